"""Bodies and events of responses, as they are written and as `/openapi.json` has them."""
