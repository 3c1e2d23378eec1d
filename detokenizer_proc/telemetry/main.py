"""Telemetry process: ends of requests in; lines of the access log, and spans for a collector, out.
In: ToTelemetry (frontend).  Out: nothing within the ring."""

import contextlib
from collections.abc import Callable

from headrace.board.fields import TelemetryField
from headrace.config.process_configs import TelemetryConfig
from headrace.detokenizer_proc.telemetry.access_log import AccessLog
from headrace.ipc.messages import RequestEnded, ToTelemetry
from headrace.ipc.sockets import REPORTS_HIGH_WATER, Inbox, address
from headrace.runtime.process import Context

IDLE_MS = 500
LAST_MS = 300  # without a report, after SIGTERM: it comes when all frontends have ended

Sink = Callable[[RequestEnded], None]


def main(config: TelemetryConfig, context: Context) -> None:
    """Report ended requests until SIGTERM."""
    where = address(config.run_dir, "telemetry")
    inbox: Inbox[ToTelemetry] = Inbox(where, ToTelemetry, REPORTS_HIGH_WATER)
    sinks: list[Sink] = [AccessLog().take] if config.access_log else []
    with contextlib.ExitStack() as at_end:
        if config.otlp_traces_endpoint is not None:
            from headrace.detokenizer_proc.telemetry.tracer import Tracer

            tracer = Tracer(config.otlp_traces_endpoint, config.model)
            at_end.callback(tracer.flush)
            sinks.append(tracer.take)
        try:
            context.ready()
            while True:
                context.slot.beat()
                take(inbox, sinks, context, IDLE_MS)
        finally:
            while take(inbox, sinks, context, LAST_MS):
                pass


def take(inbox: Inbox[ToTelemetry], sinks: list[Sink], context: Context, timeout_ms: int) -> bool:
    """Handle the next report; return whether there was one within `timeout_ms`."""
    received = inbox.receive(timeout_ms)
    if received is None:
        return False
    for sink in sinks:
        sink(received[0])
    context.slot.add(TelemetryField.TAKEN)
    return True
