"""An end that somebody asked for, and that met a callback in which Python drops exceptions."""

from __future__ import annotations

import os
import signal

import pytest

from attn_testkit.cli.run import terminated_like_interrupted


@pytest.fixture(autouse=True)
def default_handlers():
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_got_lost_is_heeded_later(how: signal.Signals) -> None:
    with terminated_like_interrupted() as interrupts:
        interrupts.heed()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), how)
        with pytest.raises(KeyboardInterrupt):
            interrupts.heed()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_is_ignored_stays_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with terminated_like_interrupted() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        interrupts.heed()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
