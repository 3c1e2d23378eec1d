"""The order in which an engine gives up what it has."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_configs import CONFIG

from headrace.config.process_configs import EngineConfig
from headrace.engine_proc import main as main_module
from headrace.engine_proc.main import run_with_workers


class Left(BaseException):
    """The engine is to end."""


def test_an_engine_listens_no_more_before_it_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes long comes last: senders move their requests as soon as nothing listens."""
    ended = list[str]()

    def leave() -> None:
        raise Left

    def ends(name: str, **methods: Any) -> Any:
        """Return a maker of what notes that it ends."""
        end = dict.fromkeys(("close", "drain", "stop"), lambda: ended.append(name))
        return lambda *_args: SimpleNamespace(**end, **methods)

    made = {
        "listen": ends("inbox"),
        "KvEventPublisher": ends("publisher"),
        "StoreClient": ends("store"),
        "WorkerGroup": ends("workers", wait_ready=leave),
        "AdminRequests": ends("requests"),
        "make_grammars": ends("grammars"),
    }
    for name, make in made.items():
        monkeypatch.setattr(main_module, name, make)
    tiers: Any = ()
    config = EngineConfig(**{**vars(CONFIG), "run_dir": str(tmp_path), "store_tiers": tiers})
    context: Any = SimpleNamespace(board=None)
    with pytest.raises(Left):
        run_with_workers(config, context)
    assert ended == ["inbox", "publisher", "store", "workers"]
