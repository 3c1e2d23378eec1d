"""Frontend process: HTTP in, HTTP out; no JSON, no text, no tokens.
In: ToFrontend (detokenizer_proc; tokenizer_proc, early answers).  Out: ToTokenizer, ToEngine."""

import asyncio
import logging
import shutil
import socket

import uvicorn
import uvloop

from headrace.board import Field, State
from headrace.config import FrontendConfig
from headrace.frontend.app import Forwarder, build_app
from headrace.frontend.exchanges import Exchanges
from headrace.links import Links
from headrace.messages import ToFrontend
from headrace.process import Context
from headrace.sockets import Inbox, address

HEARTBEAT_S = 0.1
GRACE_S = 1  # connections that do not close by then are cut when the server stops


def main(config: FrontendConfig, context: Context) -> None:
    """Serve HTTP until SIGTERM."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        uvloop.run(serve(config, context))
    finally:
        if context.orphaned:
            # The supervisor was killed, and with it everyone but the frontends, whose loop never
            # blocks: they sweep up.
            shutil.rmtree(config.run_dir, ignore_errors=True)


async def serve(config: FrontendConfig, context: Context) -> None:
    """Bind the inbox, then take connections from the socket that all frontends share."""
    inbox: Inbox[ToFrontend] = Inbox(
        address(config.run_dir, "frontend", context.index), ToFrontend, high_water=0
    )
    links = Links(config.run_dir, config.num_tokenizers, context.board, context.slot)
    exchanges = Exchanges(context.index)
    inbox.attach(asyncio.get_running_loop(), exchanges.deliver)
    forwarder = Forwarder(exchanges, links, context.slot, config.max_body_bytes)
    server = uvicorn.Server(
        uvicorn.Config(
            build_app(context.board, forwarder),
            http="httptools",
            loop="none",  # it is running already
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
        )
    )
    with socket.socket(fileno=config.listen_fd) as listener:
        beating = asyncio.create_task(beat(context, exchanges, links, server))
        context.slot.enter(State.READY)
        await server.serve(sockets=[listener])
        beating.cancel()
    inbox.close()
    links.close()


async def beat(
    context: Context, exchanges: Exchanges, links: Links, server: uvicorn.Server
) -> None:
    """Keep the board current; retry what a full link has refused; end streams when stopping."""
    while True:
        if server.should_exit:
            # What is cut short here is cut on purpose: nothing to complain of.
            logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
            for exchange in exchanges:
                exchange.drop()
        context.slot.beat()
        context.slot[Field.OPEN_REQUESTS] = len(exchanges)
        links.flush()
        links.renew(exchange.id for exchange in exchanges)
        await asyncio.sleep(HEARTBEAT_S)
