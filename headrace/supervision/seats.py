"""The seats of a server's processes."""

from headrace.board.board import Seat
from headrace.config.config import ServerConfig
from headrace.supervision.engine_groups import places_of


def seats_of(
    *configs: ServerConfig,
    takes_images: bool = False,
    handles_gets: bool = True,
    may_grow: bool = False,
) -> list[Seat]:
    """Return one seat per process; workers, vision's too, are children of the engine.

    Args:
        configs: of the models; flags of the server are read from the first one.
        handles_gets: false of an embedded ring without frontends, which is asked nothing by GET.
        may_grow: there are seats for further engines, but of models that take images.
    """
    config, places = configs[0], places_of(configs, may_grow and not takes_images)
    num_workers = sum(len(place.workers) for place in places)
    num_own = sum(not place.is_remote for place in places)
    num_preprocessors = config.preprocess_procs if takes_images else 0
    reports = config.access_log or config.otlp_traces_endpoint is not None
    has_store = config.has_kv_store and config.engine != "mock"
    counts = {
        "frontend": config.frontend_procs,
        # One has the long prompts, those after it prepare images, the last answers GETs.
        "tokenizer": config.tokenizer_procs + 1 + num_preprocessors + handles_gets,
        "engine": len(places),
        "worker": 0 if config.engine == "mock" else num_workers,
        "kv_store": num_own if has_store else 0,
        "vision": 1 if takes_images and config.engine != "mock" else 0,
        "detokenizer": config.detokenizer_procs,
        "placement": 1 if config.num_placed_engines or config.has_remote_stages else 0,
        "fetcher": 1 if takes_images and config.allowed_media_domains else 0,
        "telemetry": 1 if handles_gets and reports else 0,
    }
    return [Seat(role, i) for role, count in counts.items() for i in range(count)]
