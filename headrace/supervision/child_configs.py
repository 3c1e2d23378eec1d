"""The config of each process of a ring, by its seat."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headrace.board.board import Board, Seat
from headrace.board.fields import EngineField
from headrace.config.api_keys import digest
from headrace.config.config import ServerConfig
from headrace.config.kv_events_config import parse_kv_events
from headrace.config.model_list import anthropic_model_pages, model_pages
from headrace.config.node_flags import node_flags
from headrace.config.process_configs import (
    CrashConfig,
    DetokenizerConfig,
    EngineConfig,
    ExecutionConfig,
    FetcherConfig,
    FrontendConfig,
    GatewayConfig,
    ModelCard,
    PlacementConfig,
    RemoteEngine,
    RemoteStages,
    TelemetryConfig,
    TokenizerConfig,
)
from headrace.ipc.arena import Arena
from headrace.ipc.curve_key import make_key
from headrace.supervision.engine_files import EngineFiles
from headrace.supervision.engine_groups import EngineGroup, expects_gpus, reserved_bytes
from headrace.supervision.engine_seats import EngineSeats

PLACED_KEY = "engine-key"  # in the run directory
OF_STAGES = ("version", "digest of weights")  # the terms of a stage; it gets its flags
KEPT_BODIES = 16  # of the largest size, that may be in memory
MIN_KEPT_BYTES = 256 << 20  # of bodies, if those are small


@dataclass(frozen=True, kw_only=True)
class ChildConfigs:
    """The models of a server, and what its children inherit."""

    groups: Sequence[EngineGroup]
    run_dir: str
    started_at: int  # seconds since the epoch
    listen_fds: Sequence[int] | None  # by frontend; None is an embedded ring without any
    api_keys: Sequence[str]
    admin_keys: Sequence[str]  # none, or one
    arena: Arena | None
    fetched: Arena | None
    demand_fd: int  # as in `TokenizerConfig`
    board: Board
    files: EngineFiles
    engine_seats: EngineSeats
    crash: CrashConfig

    @property
    def config(self) -> ServerConfig:
        """The flags of the server; those of a model are the first one's."""
        return self.groups[0].config

    @property
    def cards(self) -> tuple[ModelCard, ...]:
        """The models."""
        return tuple(group.card for group in self.groups)

    def of(self, seat: Seat) -> Any:
        """Return the config of the process in a seat."""
        c, role = self.config, seat.role
        if role == "frontend":
            assert self.listen_fds is not None
            return FrontendConfig(
                run_dir=self.run_dir,
                listen_fd=self.listen_fds[seat.index],
                num_tokenizers=c.tokenizer_procs,
                max_body_bytes=c.max_body_bytes,
                models=tuple(group.capacity for group in self.groups),
                max_queued_tokens=c.max_queued_tokens,
                drain_timeout=c.drain_timeout,
                max_kept_bytes=max(KEPT_BODIES * c.max_body_bytes, MIN_KEPT_BYTES),
                api_key_digests=[digest(key.encode()) for key in self.api_keys],
                admin_key_digests=[digest(key.encode()) for key in self.admin_keys],
                allowed_origins=c.allowed_origins,
                ssl_certfile=c.ssl_certfile,
                ssl_keyfile=c.ssl_keyfile,
                profiles=c.profile_dir is not None and c.engine != "mock",
                ui=c.ui,
                pages=self._pages,
                anthropic_pages=anthropic_model_pages(self.cards, self.started_at),
                reports=c.access_log or c.otlp_traces_endpoint is not None,
                traces=self._traces,
                opens_adapters=c.allow_runtime_lora_updating,
            )
        if role == "tokenizer":
            return TokenizerConfig(
                run_dir=self.run_dir,
                cards=self.cards,
                num_frontends=c.frontend_procs,
                num_detokenizers=c.detokenizer_procs,
                seed=c.seed,
                started_at=self.started_at,
                num_tokenizers=c.tokenizer_procs,
                max_batch_size=c.tokenizer_max_batch_size,
                batch_wait_ms=c.tokenizer_batch_wait_ms,
                trust_request_chat_template=c.trust_request_chat_template,
                metrics_dialect=c.metrics_dialect,
                follows_grammars=c.engine != "mock",
                max_images=c.max_images,
                fetched_fd=None if self.fetched is None else self.fetched.fd,
                handles_gets=self.listen_fds is not None,
                takes_scripts=c.engine == "mock",
                traces=self._traces,
                prefix_fds=self.files.prefix_fds,
                enable_lora=c.enable_lora,
                lora_dir=c.lora_dir,
                max_num_queued=tuple(group.config.max_num_queued for group in self.groups),
                tells_loads=self.tells_loads,
                demand_fd=self.demand_fd,
                remote_engines=self._remote_engines,
                **self._arena_fields,
            )
        if role == "engine":
            return self._engine_config(seat.index)
        if role == "placement":
            return self._placement_config()
        if role == "fetcher":
            return self._fetcher_config()
        if role == "telemetry":
            return TelemetryConfig(
                run_dir=self.run_dir,
                model=self.cards[0].name if len(self.cards) == 1 else "",
                access_log=c.access_log,
                otlp_traces_endpoint=c.otlp_traces_endpoint,
            )
        return DetokenizerConfig(
            run_dir=self.run_dir,
            tokenizer_paths=tuple(card.tokenizer_path for card in self.cards),
            num_frontends=c.frontend_procs,
            stream_interval=c.stream_interval,
            traces=self._traces,
            remote_engines=self._remote_engines,
            vocab_size=self.cards[0].vocab_size,
        )

    @property
    def tells_loads(self) -> bool:
        """Whether models come and go."""
        return bool(self.admin_keys) or self.config.max_loaded_models is not None

    @property
    def _pages(self) -> dict[str, bytes]:
        """The list of models, by path; none where it changes, as with adapters."""
        if self.config.enable_lora or self.tells_loads:
            return {}
        return model_pages(self.cards, self.started_at)

    @property
    def _traces(self) -> bool:
        """Whether requests have spans."""
        return self.config.otlp_traces_endpoint is not None

    def _engine_config(self, index: int) -> EngineConfig:
        slot = self.board.slot("engine", index)
        model = slot[EngineField.MODEL]
        c, card = self.groups[model].config, self.groups[model].card
        replicas = [s for s in self.engine_seats.staying(index) if not self.board.is_remote(s)]
        workers = [s for s in self.board.of("worker") if self.board.engine_of(s) is slot]
        return EngineConfig(
            run_dir=self.run_dir,
            execution=ExecutionConfig.of(c, card, reserved_bytes(self.groups, model)),
            num_detokenizers=c.detokenizer_procs,
            max_num_queued=c.max_num_queued,
            scheduling_policy=c.scheduling_policy,
            target_itl_ms=c.target_itl_ms,
            enable_prefix_caching=c.enable_prefix_caching,
            async_scheduling=c.async_scheduling,
            num_speculative_tokens=c.num_speculative_tokens,
            engine=c.engine,
            mock_profile=c.mock_profile,
            embedding_size=card.embedding_size,
            eos_token_ids=card.eos_token_ids,
            mistral_tokenizer=card.mistral_tokenizer,
            crash=self.crash,
            image_token=card.image_token,
            whole_images=card.whole_images,
            image_memory_bytes=c.image_memory_bytes,
            watchdog_timeout=c.watchdog_timeout,
            cache_fds=self.files.cache_fds[index],
            first_worker=workers[0].seat.index if workers else 0,
            num_replicas=len(replicas),
            replica=replicas.index(slot) if slot in replicas else 0,
            prefix_fds=self.files.prefix_fds.get(index, ()),
            store_tiers=self.files.store_tiers[index] if self.files.store_tiers else None,
            kv_events=parse_kv_events(c.kv_events_config),
            remote=self._remote_engine(index),
            gateway=self._gateway,
            remote_stages=self._remote_stages,
            **self._arena_fields,
        )

    @property
    def _remote_engines(self) -> dict[int, RemoteEngine]:
        """Where all engines on other machines are, by their seats."""
        found = {index: self._remote_engine(index) for index in self._remote_seats}
        return {index: remote for index, remote in found.items() if remote is not None}

    def _remote_engine(self, index: int) -> RemoteEngine | None:
        """Return where the engine of a seat is, if it is on another machine."""
        c, remote = self.config, self._remote_seats
        if index not in remote:
            return None
        place = remote.index(index)
        is_placed = place >= len(c.remote_engines)
        key_file = self._placed_key_file if is_placed else c.engine_key_file
        assert key_file is not None
        return RemoteEngine(
            address=None if is_placed else c.remote_engines[place],
            key_file=key_file,
            terms=self._terms,
        )

    @property
    def _remote_stages(self) -> RemoteStages | None:
        """What an engine knows of stages on other machines, if it has some."""
        c = self.config
        if not c.has_remote_stages:
            return None
        return RemoteStages(
            run_dir=self.run_dir,
            key_file=self._placed_key_file,
            watchdog_timeout=c.watchdog_timeout,
            terms={name: self._terms[name] for name in OF_STAGES},
        )

    @property
    def _remote_seats(self) -> list[int]:
        """The seats of engines on other machines. Those that are placed come last."""
        return [s.seat.index for s in self.board.of("engine") if self.board.is_remote(s)]

    @cached_property
    def _placed_key_file(self) -> str:
        """The key of links to engines and stages that are placed; made at the first spawn."""
        path = os.path.join(self.run_dir, PLACED_KEY)
        make_key(path)
        return path

    def _placement_config(self) -> PlacementConfig:
        if self.config.has_remote_stages:
            return PlacementConfig(
                run_dir=self.run_dir,
                key_file=self._placed_key_file,
                seats={f"stage {i}": ("worker", i) for i in range(1, self.config.pp)},
                num_cpus=2,  # its worker, and what is between that and the links
                num_gpus=0,
                flags={"log_level": self.config.log_level},
                address=self.config.address,
                are_stages=True,
            )
        engines = self._remote_seats[len(self.config.remote_engines) :]
        return PlacementConfig(
            run_dir=self.run_dir,
            key_file=self._placed_key_file,
            seats={f"engine {index}": ("engine", index) for index in engines},
            num_cpus=self.config.num_workers + 1,
            num_gpus=self.config.tp if expects_gpus(self.config) else 0,
            flags=node_flags(self.config, expects_gpus(self.config)),
            address=self.config.address,
        )

    @cached_property
    def _terms(self) -> dict[str, str]:
        """The terms of the first spawn, with what the disk had then."""
        return self.groups[0].terms

    @property
    def _gateway(self) -> GatewayConfig | None:
        """What an engine that serves another machine knows of that."""
        if self.config.engine_listen is None:
            return None
        assert self.config.engine_key_file is not None
        return GatewayConfig(
            listen=self.config.engine_listen,
            key_file=self.config.engine_key_file,
            terms=self._terms,
            prefix_fds=self.files.prefix_fds[0],
        )

    def _fetcher_config(self) -> FetcherConfig:
        assert self.fetched is not None
        return FetcherConfig(
            run_dir=self.run_dir,
            allowed_domains=self.config.allowed_media_domains,
            max_bytes=self.config.max_body_bytes,
            fetched_fd=self.fetched.fd,
        )

    @property
    def _arena_fields(self) -> dict[str, Any]:
        """Return the configuration of processes that share the arena."""
        if self.arena is None:
            return {}
        num_regions = self.config.preprocess_procs
        return {"arena_fd": self.arena.fd, "num_arena_regions": num_regions}
