"""The links of an engine: to its ring, or by a gateway to a server on another machine."""

from headrace.config.process_configs import EngineConfig
from headrace.engine_proc.gateway.gateway import Gateway
from headrace.engine_proc.request_io.detokenizer_links import DetokenizerLinks
from headrace.engine_proc.request_io.turn import EngineInbox
from headrace.ipc.messages import ToEngine
from headrace.ipc.sockets import Inbox, address
from headrace.runtime.process import Context


def listen(config: EngineConfig, context: Context) -> EngineInbox:
    """Return where messages to an engine come, from now on.

    Raises:
        ConfigError: the address of `--engine-listen` cannot be bound.
        OSError: the disk is full, say.
    """
    if config.gateway is not None:
        gateway = Gateway(config.gateway, context)
        gateway.start()
        return gateway
    where = address(config.run_dir, "engine", context.index)
    inbox: Inbox[ToEngine] = Inbox(where, ToEngine, tee=context.tee)
    return inbox


def detokenizer_links(
    config: EngineConfig, context: Context, inbox: EngineInbox
) -> DetokenizerLinks:
    """Return the links to detokenizers, by the gateway if messages come there."""
    num, board, slot = config.num_detokenizers, context.board, context.slot
    if isinstance(inbox, Gateway):
        return DetokenizerLinks(map(inbox.outbox, range(num)), board, slot)
    return DetokenizerLinks.of_ring(config.run_dir, num, board, slot)
