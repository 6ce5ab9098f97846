"""The order of sleep, wake, receive and generate, without an engine."""

from __future__ import annotations

import pytest

from flowrl.workers.engine_memory import EngineMemory


def test_a_fresh_engine_may_do_everything() -> None:
    memory = EngineMemory()
    memory.check_generate()
    memory.check_receive()
    assert memory.wake("all") == []


def test_parts_wake_once_and_in_order() -> None:
    memory = EngineMemory()
    assert memory.sleep() and not memory.sleep(), "nothing is left to give back the second time"
    assert memory.wake("weights") == ["weights"] and memory.wake("weights") == []
    assert memory.wake("all") == ["kv_cache"]
    assert memory.sleep()
    assert memory.wake("all") == ["weights", "kv_cache"]
    with pytest.raises(ValueError, match="cannot wake 'cache'; known: all, weights, kv_cache"):
        memory.wake("cache")


def test_weights_that_slept_must_be_received_before_the_next_response() -> None:
    """SYN-01: no sleep level leaves old, empty or foreign weights in use."""
    memory = EngineMemory()
    memory.sleep()
    with pytest.raises(ValueError, match=r"weights are asleep.*call rollout.wake\(what='weights'\)"):
        memory.check_receive()
    with pytest.raises(ValueError, match="weights and kv_cache sleep"):
        memory.check_generate()
    memory.wake("all")
    with pytest.raises(ValueError, match=r"lost its weights.*call rollout.receive_weights\(actor\)"):
        memory.check_generate()
    memory.check_receive()
    memory.received()
    memory.check_generate()
