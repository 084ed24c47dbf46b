"""Arrays of JAX: sources, and never targets."""

import asyncio

import memferry
import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")


def test_an_array_is_a_source():
    source = jnp.arange(1 << 18, dtype=jnp.float32)
    target = np.empty(1 << 18, np.float32)
    memferry.copy(target, source)
    assert (target == np.asarray(source)).all()
    # Only host memory is compared.
    if jax.default_backend() == "cpu":
        assert memferry.compare(target, source) is None


def test_a_result_that_is_still_computed_is_waited_for():
    square = jax.jit(lambda one: one @ one)(jnp.ones((1000, 1000)))
    target = np.empty((1000, 1000), np.float32)
    memferry.copy(target, square)
    assert (target == 1000).all()


def test_a_copy_keeps_an_array_that_is_gone():
    target = np.empty(1 << 20, np.float32)

    async def hand_over():
        await memferry.icopy(target, jnp.full(1 << 20, 7, dtype=jnp.float32))

    asyncio.run(hand_over())
    assert (target == 7).all()


def test_a_type_that_the_buffer_protocol_lacks_comes_by_dlpack():
    source = jnp.arange(1000, dtype=jnp.bfloat16)
    target = bytearray(2000)
    memferry.copy(target, source)
    assert target == np.asarray(source).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_array_is_never_a_target(dtype):
    target = jnp.zeros(16, dtype=dtype)
    data = bytes(target.nbytes)
    for write in [
        lambda: memferry.copy(target, data),
        lambda: memferry.icopy(target, data),
        lambda: memferry.fill(target, 1),
    ]:
        with pytest.raises(ValueError, match="read-only"):
            write()
    assert (target == 0).all()


def test_a_deleted_array_is_refused():
    array = jnp.arange(16) + 1
    array.delete()
    with pytest.raises(BufferError):
        memferry.copy(bytearray(64), array)
