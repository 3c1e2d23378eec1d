"""Which drafts pay, and what texts suggest."""
