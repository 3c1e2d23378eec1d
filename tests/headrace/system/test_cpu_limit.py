"""Code that takes too long is interrupted, or ends its process; other code is left alone."""

import hashlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from headrace.errors import InvalidValue, ModelError
from headrace.system.cpu_limit import CpuLimit, CpuLimitExceeded
from headrace.tokenizer_proc.encoding.chat_template import ChatTemplate, TemplateTooSlow
from headrace.tokenizer_proc.requests.openai import ChatRequest, RequestMessage

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
# One call, quadratic, that nothing interrupts.
SEARCH = "{% set n = messages[0].content | int %}{{ ('a' * 2 * n).rfind('ab' + 'a' * n) }}"
STUCK = f"""
from headrace.tokenizer_proc.encoding.chat_template import ChatTemplate
from headrace.tokenizer_proc.requests.openai import ChatRequest, RequestMessage
template = ChatTemplate({SEARCH!r}, {{}}, cpu_s=0.5)
print(template.render(ChatRequest(messages=[RequestMessage("user", "3")])), flush=True)
template.render(ChatRequest(messages=[RequestMessage("user", "1000000")]))
"""


def conversation(content: str) -> ChatRequest:
    return ChatRequest(messages=[RequestMessage("user", content)])


def timers() -> tuple[float, float]:
    return signal.getitimer(signal.ITIMER_VIRTUAL)[0], signal.getitimer(signal.ITIMER_PROF)[0]


def test_a_template_that_does_not_end_refuses_its_request_alone() -> None:
    source = "{% if messages[0].content == 'x' %}" + ENDLESS + "{% endif %}fine"
    template = ChatTemplate(source, {}, cpu_s=0.5)
    with pytest.raises(
        InvalidValue, match=r"takes more than 0\.5 s of CPU time for them"
    ) as refused:
        template.render(conversation("x"))
    assert refused.value.param == "messages"
    assert timers() == (0, 0)
    assert template.render(conversation("y")) == "fine"
    assert timers() == (0, 0)


def test_uninterruptible_code_ends_the_process_with_traceback() -> None:
    result = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True)
    assert result.stdout.split() == ["-1"]
    assert result.returncode == -signal.SIGPROF
    assert "in render" in result.stderr


def test_slow_template_compilation_is_a_model_error() -> None:
    with pytest.raises(ModelError, match=r"chat template takes more than 0\.5 s of CPU time"):
        ChatTemplate("{{ 9 ** (9 ** 8) }}", {}, cpu_s=0.5)


def test_limit_with_a_deadline_counts_the_main_thread() -> None:
    work = ("sha256", b"x", b"y", 1_000_000)  # takes more than the limit, and no interpreter lock
    with CpuLimit(0.05, deadly_s=120):
        thread = threading.Thread(target=hashlib.pbkdf2_hmac, args=work)
        thread.start()
        thread.join()
    with pytest.raises(CpuLimitExceeded, match=r"more than 0\.05 s"), CpuLimit(0.05, 120):
        while True:
            pass
    assert timers() == (0, 0)


def test_patience_with_a_conversation_is_not_that_with_the_model() -> None:
    source = "{% if messages[0].content == 'x' %}" + ENDLESS + "{% endif %}fine"
    template = ChatTemplate(source, {}, patience_s=0.05)
    with pytest.raises(TemplateTooSlow, match=r"takes more than 0\.05 s of CPU time"):
        template.render(conversation("x"))
    with pytest.raises(ModelError, match="more than 2 s"):
        ChatTemplate("{{ 9 ** (9 ** 8) }}", {}, patience_s=0.05)


def test_an_error_leaves_no_timer_behind() -> None:
    with pytest.raises(ZeroDivisionError), CpuLimit(10):
        raise ZeroDivisionError
    assert timers() == (0, 0)


def test_each_limit_says_its_own_time() -> None:
    short, long = CpuLimit(10), CpuLimit(20)
    for limit, said in ((short, "10 s"), (long, "20 s"), (short, "10 s")):
        with pytest.raises(CpuLimitExceeded, match=f"more than {said}"), limit:
            signal.raise_signal(signal.SIGVTALRM)


def test_an_interrupt_leaves_no_timer_behind() -> None:
    limit = CpuLimit(10)
    with pytest.raises(CpuLimitExceeded), limit:
        signal.raise_signal(signal.SIGVTALRM)
    assert timers() == (0, 0)


def test_an_interruption_that_is_swallowed_comes_again() -> None:
    # The kernel's time counts towards the deadline alone: twice the limit can come before it.
    limit, num_swallowed = CpuLimit(0.02, deadly_s=120), 0
    end = time.process_time() + 5
    with pytest.raises(CpuLimitExceeded), limit:
        while time.process_time() < end:
            try:
                while time.process_time() < end:
                    hashlib.sha256(b"")
            except CpuLimitExceeded:  # as a callback of the garbage collector does
                num_swallowed += 1
                if num_swallowed == 3:
                    raise
    assert timers() == (0, 0)
