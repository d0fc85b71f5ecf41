"""Adapters, buffers, caches, refusals and profiles."""

import gc
import os
from types import SimpleNamespace

import numpy as np
import pytest
import wgpu

from mamba_ops.gpu import adapters, timestamps
from mamba_ops.gpu import device as module
from mamba_ops.gpu.adapters import choose, list_adapters, open_device, safe_without_checks
from mamba_ops.gpu.device import DeviceError, grid
from mamba_ops.gpu.products import gemm
from mamba_ops.gpu.workspace import GpuWorkspace, range_of
from mamba_ops.parameters import EMBEDDING


def fake(device, kind="DiscreteGPU", backend="Vulkan", vendor=""):
    info = dict(device=device, description="driver 1", adapter_type=kind, backend_type=backend, vendor=vendor)
    return SimpleNamespace(info=info)


GL = fake("NVIDIA H200/PCIe", "Unknown", "OpenGL")
NVIDIA = fake("NVIDIA H200")
INTEL = fake("Intel(R) UHD Graphics", "IntegratedGPU")
LLVMPIPE = fake("llvmpipe (LLVM 15.0.6)", "CPU", vendor="llvmpipe")
SWIFTSHADER = fake("SwiftShader Device (Subzero)", "Unknown")
WARP = fake("Microsoft Basic Render Driver", "Unknown", "D3D12")


@pytest.fixture
def found(monkeypatch):
    """Return the function that sets the adapters of the machine."""
    return lambda *them: monkeypatch.setattr(wgpu.gpu, "enumerate_adapters_sync", lambda: list(them))


@pytest.fixture
def own(adapter):
    """A workspace on a device that no other test uses."""
    device = open_device(adapter, checks=True)
    with GpuWorkspace(device) as ops:
        yield ops
        device.close()


def test_hardware_comes_first_and_vulkan_before_opengl(found):
    found(LLVMPIPE, GL, INTEL, WARP, NVIDIA)
    assert list_adapters() == [NVIDIA, INTEL, GL, LLVMPIPE, WARP]
    assert choose("auto").adapter is NVIDIA
    assert choose("gpu")[:2] == (NVIDIA, "found NVIDIA H200 (driver 1), DiscreteGPU, Vulkan")
    assert choose(1).adapter is choose("1").adapter is INTEL
    assert choose("uhd").adapter is INTEL
    assert choose("LLVMpipe").adapter is LLVMPIPE


def test_software_adapters_are_used_only_when_named(found):
    found(LLVMPIPE, SWIFTSHADER, WARP)
    adapter, reason = choose("auto")[:2]
    assert adapter is None
    assert "no hardware adapter" in reason
    assert "\n" not in reason
    with pytest.raises(DeviceError, match=r"no hardware adapter; found: \[0\] llvmpipe.*install the driver"):
        choose("gpu")
    assert choose("swiftshader").adapter is SWIFTSHADER
    assert choose("Microsoft Basic").adapter is WARP


def test_no_adapter_at_all(found):
    found()
    assert choose("auto").adapter is None
    assert choose("cpu").adapter is None
    for wanted in ("gpu", "0", "llvmpipe"):
        with pytest.raises(DeviceError, match="found: no adapter at all"):
            choose(wanted)


def test_checks_go_off_only_where_that_was_tried():
    assert safe_without_checks(NVIDIA)
    assert safe_without_checks(LLVMPIPE)
    assert not any(map(safe_without_checks, (GL, INTEL, SWIFTSHADER, WARP)))


def test_write_and_read(gpu):
    a = gpu.upload(np.arange(7, dtype=np.float32))
    np.testing.assert_array_equal(gpu.read(a), np.arange(7))
    assert np.isnan(gpu.read(gpu.empty(3, 5))).all()
    whole = gpu.empty(3, 1)
    assert np.isnan(gpu.device.read(whole.buffer, np.float32, 4)).all()


def test_writes_zeros_and_copies_come_in_order(gpu_once):
    ops = gpu_once
    a, b = ops.upload(np.ones((2, 2), np.float32)), ops.upload(np.eye(2, dtype=np.float32))
    c, d = ops.empty(2, 2), ops.empty(2, 2)
    gemm(ops, "nn", range_of(a), range_of(b), range_of(c), 2, 2, 2)
    ops.device.copy(c.buffer, d.buffer)
    ops.zero(c)
    gemm(ops, "nn", range_of(b), range_of(d), range_of(c), 2, 2, 2, add=True)
    ops.write_parameter(a, np.full((2, 2), 5, np.float32))
    gemm(ops, "nn", range_of(a), range_of(b), range_of(c), 2, 2, 2, add=True)
    np.testing.assert_array_equal(ops.read(c), np.full((2, 2), 6))
    np.testing.assert_array_equal(ops.read(d), np.ones((2, 2)))


def test_long_streams_are_submitted_on_the_way(gpu_once, monkeypatch):
    a, c = gpu_once.upload(np.ones((1, 1), np.float32)), gpu_once.upload(np.zeros((1, 1), np.float32))
    flushes = []
    flush = gpu_once.device.flush
    monkeypatch.setattr(gpu_once.device, "flush", lambda: flushes.append(flush()))
    for _ in range(200):
        gemm(gpu_once, "nn", range_of(a), range_of(a), range_of(c), 1, 1, 1, add=True)
    assert len(flushes) == 200 // module.DISPATCHES_PER_SUBMISSION
    np.testing.assert_array_equal(gpu_once.read(c), [[200]])


def test_scopes_give_the_same_buffers_back(gpu_once):
    seen = []
    for _ in range(3):
        with gpu_once.scope():
            arrays = [gpu_once.empty(3, 5), gpu_once.empty(3, 5), gpu_once.empty(2, 2)]
            with gpu_once.scope():
                arrays.append(gpu_once.empty(3, 5))
            assert gpu_once.empty(5, 3).buffer is arrays[-1].buffer
        seen.append([array.buffer for array in arrays])
    assert seen[0] == seen[1] == seen[2]
    assert gpu_once.held_bytes() == 3 * 64 + 16


def test_a_state_goes_back_to_the_pools_with_its_last_reference(gpu_once):
    state = gpu_once.layer_state(2, 3, 4, 4)
    buffers = state.conv.buffer, state.scan.buffer
    gpu_once.write_parameter(state.scan, np.ones((2, 4, 3), np.float32))
    del state
    gc.collect()
    state = gpu_once.layer_state(2, 3, 4, 4)
    assert (state.conv.buffer, state.scan.buffer) == buffers
    np.testing.assert_array_equal(gpu_once.read(state.scan), np.zeros((2, 4, 3)))
    assert gpu_once.read(gpu_once.layer_state(2, 3, 4, 1).conv).shape == (2, 0, 3)


def test_closing_frees_everything(adapter):
    device = open_device(adapter, checks=True)
    with GpuWorkspace(device) as ops:
        empty = device.held_bytes
        kept = ops.upload(np.ones((8, 8), np.float32))
        gemm(ops, "nn", range_of(kept), range_of(kept), range_of(ops.empty(8, 8)), 8, 8, 8)
        ops.layer_state(1, 2, 3, 4)
        assert ops.held_bytes() == 256 + 256 + 32 + 32
        assert device.held_bytes > 512
        ops.release([kept])
        with pytest.raises(DeviceError, match="was freed"):
            ops.read(kept)
    assert empty <= device.held_bytes < 256
    assert not device._groups
    device.close()
    device.close()
    assert device.held_bytes == 0
    for call in (lambda: device.buffer(4), lambda: ops.upload(np.ones(4, np.float32)), device.wait):
        with pytest.raises(DeviceError, match="is closed"):
            call()


def test_bind_groups_survive_the_reuse_of_ids(own):
    """A freed buffer's id may be given to the next one; its bind groups are gone with it."""
    b, c = own.upload(np.ones((1, 1), np.float32)), own.empty(1, 1)
    for value in range(50):
        a = own.upload(np.full((1, 1), value, np.float32))
        gemm(own, "nn", range_of(a), range_of(b), range_of(c), 1, 1, 1)
        np.testing.assert_array_equal(own.read(c), [[value]])
        own.release([a])
        del a
    assert len(own.device._groups) == 0


def test_the_cache_of_bind_groups_is_bounded(own, monkeypatch):
    monkeypatch.setattr(module, "CACHED_GROUPS", 8)
    a = own.upload(np.ones((40, 40), np.float32))
    c = own.empty(40, 40)
    for size in range(1, 30):
        gemm(own, "nn", range_of(a), range_of(a), range_of(c), size, size, size)
    assert len(own.device._groups) <= 8
    assert len(own.device._uniforms) <= 9
    np.testing.assert_array_equal(own.read(c)[:29, :29], np.full((29, 29), 29))


def test_case_48_parameters_are_split_by_rows_above_the_limit(own, monkeypatch):
    monkeypatch.setattr(own.device, "binding_limit", 512)
    host = np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32)
    embedding, other = own.upload_parameter(EMBEDDING, host), own.upload_parameter("w", host)
    assert [(part.first, part.rows) for part in embedding.parts] == [(0, 16), (16, 16), (32, 8)]
    assert len(other.parts) == 1
    np.testing.assert_array_equal(own.read(embedding), host)
    zeros = own.zeros_like(embedding)
    assert [part.rows for part in zeros.parts] == [16, 16, 8]
    own.write_parameter(zeros, host + 1)
    np.testing.assert_array_equal(own.read(zeros), host + 1)
    own.zero(zeros)
    assert not own.read(zeros).any()
    with pytest.raises(DeviceError, match=r"shape \(40, 8\) lies in 3 row parts"):
        embedding.buffer  # noqa: B018
    with pytest.raises(DeviceError, match=f"parameter {EMBEDDING}: 2,080 bytes in 2 rows.*limit of 512 bytes"):
        own.upload_parameter(EMBEDDING, np.zeros((2, 260), np.float32))


def test_case_48_the_whole_embedding_fits_in_parts_of_128_mib(own, monkeypatch):
    monkeypatch.setattr(own.device, "binding_limit", 1 << 27)
    assert own._rows_per_part(EMBEDDING, (50280, 768)) == 43690 - 43690 % 64
    assert own._rows_per_part(EMBEDDING, (43690, 768)) == 43690


def test_uploads_are_checked(own):
    a = own.upload(np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match=r"\(3, 2\) for one of \(2, 3\)"):
        own.write_parameter(a, np.zeros((3, 2), np.float32))
    with pytest.raises(ValueError, match="float64"):
        own.upload(np.zeros(2))
    with pytest.raises(DeviceError, match="24 bytes asked of a buffer of 16"):
        own.device.read(own.empty(2, 2).buffer, np.float32, 6)


def test_an_allocation_above_the_limits_names_both(own):
    limit = own.device.limits["max-storage-buffer-binding-size"]
    with pytest.raises(DeviceError, match=rf"an activation of \(\d+, 4\): .* above max-.* of {own.device.name[:4]}"):
        own.empty(limit // 8, 4)


def test_refused_memory_says_what_is_held(own, monkeypatch):
    own.upload(np.zeros((16, 16), np.float32))

    def refuse(**_):
        raise wgpu.GPUOutOfMemoryError("Not enough memory left.")

    monkeypatch.setattr(own.device.wgpu, "create_buffer", refuse)
    with pytest.raises(DeviceError, match=r"an activation of \(3, 4\): 48 bytes on .* holds 1,024: out of memory"):
        own.empty(3, 4)


def test_a_destroyed_buffer_is_an_error_and_not_an_abort(own):
    array = own.upload(np.zeros((4, 4), np.float32))
    own.device.free([array.buffer])
    for call in (own.read, own.zero, lambda a: own.write_parameter(a, np.zeros((4, 4), np.float32))):
        with pytest.raises(DeviceError, match="was freed"):
            call(array)
    with pytest.raises(DeviceError, match="was freed"):
        gemm(own, "nn", range_of(array), range_of(array), range_of(own.empty(4, 4)), 4, 4, 4)


def test_a_lost_device_is_an_error(own):
    array = own.upload(np.zeros((4, 4), np.float32))
    own.device.wgpu.destroy()
    calls = (
        lambda: own.read(array),
        lambda: own.empty(7, 7),
        lambda: own.write_parameter(array, np.zeros((4, 4), np.float32)),
        own.device.wait,
    )
    for call in calls:
        with pytest.raises(DeviceError, match="the device was lost"):
            call()
    own.zero(array)
    with pytest.raises(DeviceError, match="the device was lost"):
        own.device.flush()


def test_a_wrong_kernel_names_itself(own, monkeypatch):
    monkeypatch.setattr(module.wgsl, "program", lambda stem, constants: "fn f( {}")
    for checks in (True, False):
        monkeypatch.setattr(own.device, "checks", checks)
        with pytest.raises(DeviceError, match=r"compiling rms_norm.wgsl, forward, \{'LANES': 1\}: refused"):
            own.device.pipeline("rms_norm", "forward", LANES=1)


def test_not_after_a_fork(own, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(DeviceError, match="before a fork"):
        own.device.buffer(4)


def test_profile_times_each_kernel(gpu_once):
    device = gpu_once.device
    if "timestamp-query" not in device.wgpu.features:
        pytest.skip("the adapter has no timestamp queries")
    a, c = gpu_once.upload(np.ones((64, 64), np.float32)), gpu_once.empty(64, 64)
    with device.profile() as times:
        for _ in range(3):
            gemm(gpu_once, "nn", range_of(a), range_of(a), range_of(c), 64, 64, 64)
        gemm(gpu_once, "nt", range_of(a), range_of(a), range_of(c), 64, 64, 64, label="head")
    assert {(time.kernel, time.dispatches) for time in times} == {("linear.backward_x", 3), ("head", 1)}
    assert all(0 <= time.milliseconds < 10000 for time in times)
    assert [time.milliseconds for time in times] == sorted((time.milliseconds for time in times), reverse=True)
    np.testing.assert_array_equal(gpu_once.read(c), np.full((64, 64), 64))


def test_profile_of_more_dispatches_than_queries(gpu_once, monkeypatch):
    monkeypatch.setattr(timestamps, "QUERIES", 8)
    a, c = gpu_once.upload(np.ones((1, 1), np.float32)), gpu_once.upload(np.zeros((1, 1), np.float32))
    with gpu_once.device.profile() as times:
        for _ in range(11):
            gemm(gpu_once, "nn", range_of(a), range_of(a), range_of(c), 1, 1, 1, add=True)
    assert times[0][:2] == ("linear.backward_x", 11)
    np.testing.assert_array_equal(gpu_once.read(c), [[11]])


def test_profile_without_timestamps_says_so(gpu_once, monkeypatch):
    monkeypatch.setattr(gpu_once.device, "wgpu", SimpleNamespace(features=set()))
    with pytest.raises(DeviceError, match="no timestamp queries"), gpu_once.device.profile():
        pass


def test_grid():
    assert grid(1) == (1, 1, 1)
    assert grid(65535) == (65535, 1, 1)
    x, y, _ = grid(70000)
    assert max(x, y) <= 65535
    assert x * y >= 70000


def test_description(adapter):
    assert adapters.describe(adapter).count("\n") == 0
