"""Products and the selective scan on one adapter: checked first, then timed.

`python benchmarks/gpu_ops.py --adapter NVIDIA` holds every op to NumPy in float64, times it by timestamp queries and
by the wall clock, beside torch in strict float32 where torch has CUDA, prints a table and keeps it as JSON with the
adapter's name. `--sweep tiles` times every kind of tile for each product, `--sweep splits` the tiles in use with
every split of k. `--small` takes tiny sizes (a software adapter).
"""

import argparse
import json
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from mamba_ops.cpu import open_cpu
from mamba_ops.gpu import products
from mamba_ops.gpu.adapters import choose, describe, open_device
from mamba_ops.gpu.device import DeviceError
from mamba_ops.gpu.gpu_ops import GpuOps
from mamba_ops.gpu.workspace import DeviceArray, range_of
from mamba_ops.gradients import GradientBuffers
from mamba_ops.ops import Batch, Columns

# layout and (m, n, k) of mamba-130m's products, batch 8, L 512
PRODUCTS: dict[str, tuple[str, int, int, int]] = {
    "4096^3": ("nt", 4096, 4096, 4096),
    "in_proj": ("nt", 4096, 3072, 768),
    "x_proj": ("nt", 4096, 80, 1536),
    "dt_proj": ("nt", 4096, 1536, 48),
    "out_proj": ("nt", 4096, 768, 1536),
    "head": ("nt", 4096, 50304, 768),
    "in_proj dx": ("nn", 4096, 768, 3072),
    "x_proj dx": ("nn", 4096, 1536, 80),
    "dt_proj dx": ("nn", 4096, 48, 1536),
    "out_proj dx": ("nn", 4096, 1536, 768),
    "head dx": ("nn", 4096, 768, 50304),
    "in_proj dweight": ("tn", 3072, 768, 4096),
    "x_proj dweight": ("tn", 80, 1536, 4096),
    "dt_proj dweight": ("tn", 1536, 48, 4096),
    "out_proj dweight": ("tn", 768, 1536, 4096),
    "head dweight": ("tn", 50304, 768, 4096),
}
SCANS = {"L 512": (8, 512, 1536, 16), "L 2048": (8, 2048, 1536, 16)}
SMALL_SCANS = {"L 33": (2, 33, 24, 16)}
SAMPLE = 64


def milliseconds(ops: GpuOps, run: Callable[[], Any], repeats: int, calls: int) -> dict[str, float]:
    """Return the median times of one call of `run`: on the device by timestamps, and by the wall clock."""
    with ops.scope():
        run()
    ops.device.wait()
    wall, device = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            with ops.scope():
                run()
        ops.device.wait()
        wall.append((time.perf_counter() - start) / calls * 1e3)
    try:
        for _ in range(repeats):
            with ops.device.profile() as times:
                for _ in range(calls):
                    with ops.scope():
                        run()
            device.append(sum(kernel.milliseconds for kernel in times) / calls)
    except DeviceError as error:
        print(error)
    return {"device ms": statistics.median(device) if device else float("nan"), "wall ms": statistics.median(wall)}


def check(name: str, found: np.ndarray, wanted: np.ndarray, tolerance: float) -> float:
    """Return max|found - wanted| / max|wanted|; ends the program above the tolerance."""
    error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    if not error <= tolerance:
        sys.exit(f"{name}: wrong by {error:.3e}, more than {tolerance:g}")
    return error


def operands(layout: str, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return A and B as they lie in memory."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((m, k) if layout[0] == "n" else (k, m), np.float32)
    return a, rng.standard_normal((k, n) if layout[1] == "n" else (n, k), np.float32)


def check_product(name: str, layout: str, a: np.ndarray, b: np.ndarray, found: np.ndarray) -> float:
    """Compare a sample of rows and columns with float64."""
    rng = np.random.default_rng(1)
    rows, columns = (rng.permutation(size)[:SAMPLE] for size in found.shape)
    wide_a = (a[rows] if layout[0] == "n" else a[:, rows].T).astype(np.float64)
    wide_b = (b[:, columns] if layout[1] == "n" else b[columns].T).astype(np.float64)
    return check(name, found[np.ix_(rows, columns)], wide_a @ wide_b, 1e-4)


def torch_product(layout: str, a: np.ndarray, b: np.ndarray, repeats: int, calls: int) -> float:
    """Return torch's median time of the same product on CUDA in strict float32, nan where there is none."""
    try:
        import torch
    except ImportError:
        return float("nan")
    if not torch.cuda.is_available():
        return float("nan")
    torch.backends.cuda.matmul.allow_tf32 = False
    x, y = torch.from_numpy(a).cuda(), torch.from_numpy(b).cuda()
    x, y = x if layout[0] == "n" else x.T, y if layout[1] == "n" else y.T
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            x @ y
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    del x, y
    torch.cuda.empty_cache()
    return statistics.median(times[1:])


def time_product(
    device: Any, name: str, shape: tuple[str, int, int, int], repeats: int, calls: int, sweep: str | None
) -> list[dict[str, Any]]:
    """Check and time one product: with the plan it would be given, and with those of `sweep`."""
    layout, m, n, k = shape
    a, b = operands(*shape)
    chosen = products.choose_plan(device, m, n, k)
    rows = []
    with GpuOps(device) as ops:
        x, y, out = ops.upload(a), ops.upload(b), ops.empty(m, n)
        row: dict[str, Any]
        for plan in [chosen, *plans(device, sweep, m, n, k)]:
            ops.zero(out)

            def run(plan: products.Plan = plan) -> None:
                products.gemm(ops, layout, range_of(x), range_of(y), range_of(out), m, n, k, plan=plan)  # type: ignore[arg-type]

            with ops.scope():
                run()
            error = check_product(name, layout, a, b, ops.read(out))
            row = {"op": name, "shape": f"{layout} {m} x {n} x {k}", "cut": describe_plan(plan), "error": error}
            row |= milliseconds(ops, run, repeats, calls)
            row |= {"TFLOP/s": 2e-9 * m * n * k / row["device ms"], "expected ms": expected(plan, m, n, k)}
            rows.append(row | {"chosen": plan is chosen})
            print_row(rows[-1])
    rows[0]["torch ms"] = torch_product(layout, a, b, repeats, calls)
    return rows


def plans(device: Any, sweep: str | None, m: int, n: int, k: int) -> list[products.Plan]:
    """Return the plans worth timing: `tiles` of every kind, or those in use with every number of `splits`."""
    memory = device.limits["max-compute-workgroup-storage-size"]
    if sweep == "splits":
        tiles = [tile for tile in products.TILES if tile.nbytes <= memory]
        splits = [s for s in (1, 2, 3, 4, 6, 8, 12, 16) if s * m * n * 4 <= 1 << 30]
        return [products.Plan(tile, s) for tile, s in product(tiles, splits) if s == 1 or s * 4 * tile.depth <= k]
    found = []
    sizes = [(256, 128, 4, 2), (128, 128, 2, 2), (128, 64, 2, 2), (64, 128, 2, 2), (64, 64, 2, 2), (64, 64, 2, 1)]
    sizes += [(64, 32, 2, 1), (32, 32, 1, 1)]
    for (rows, columns, rows4, cols4), depth, unroll, lanes in product(sizes, (8, 16), (16, 8, 4, 1), (8, 16)):
        tile = products.Tile(rows, columns, depth, rows4, cols4, unroll, lanes, 1.0)
        threads_m, threads_n = rows // (4 * rows4), columns // (4 * cols4)
        wrong = unroll > depth or threads_n % lanes or threads_m % (32 // lanes) or tile.nbytes > memory
        if not wrong:
            found.append(products.Plan(tile, 1))
    return found if sweep == "tiles" else []


def expected(plan: products.Plan, m: int, n: int, k: int) -> float:
    """Return the time that `choose_plan` expects, in ms."""
    return products.microseconds(plan.tile, plan.splits, m, n, k) * 1e-3


def describe_plan(plan: products.Plan) -> str:
    """Return a plan in a few characters."""
    tile = plan.tile
    each = f"{4 * tile.rows4}x{4 * tile.cols4}"
    return f"{tile.m}x{tile.n}x{tile.depth} {each} unroll {tile.unroll} lanes {tile.lanes_n} splits {plan.splits}"


def scan_inputs(batch: int, L: int, d_inner: int, d_state: int) -> tuple[Batch, dict[str, np.ndarray]]:
    """Return a batch with a boundary in each row, and the scan's operands; `BC` holds B, then C."""
    rng = np.random.default_rng(0)
    T = batch * L
    positions = np.tile(np.concatenate([np.arange(L // 3), np.arange(L - L // 3)]), (batch, 1)).astype(np.uint32)
    ids = np.zeros((batch, L), np.int64)
    host = {name: rng.standard_normal((T, d_inner), np.float32) for name in ("u", "delta", "z", "dy")}
    host["BC"] = rng.standard_normal((T, 2 * d_state), np.float32)
    host["A_log"] = np.tile(np.log(np.arange(1, d_state + 1, dtype=np.float32)), (d_inner, 1))
    host["D"], host["bias"] = np.ones(d_inner, np.float32), rng.uniform(-6.9, -2.3, d_inner).astype(np.float32)
    return Batch(ids, ids, positions), host


def scan(ops: Any, grads: Any, rows: Any, host: dict[str, Any], new: Callable[..., Any]) -> tuple[Callable, Callable]:
    """Return the calls that run the scan forward and backward; the backward returns what it wrote."""
    d_state = host["BC"].shape[1] // 2
    B, C = Columns(host["BC"], 0, d_state), Columns(host["BC"], d_state, d_state)
    z = Columns(host["z"], 0, host["z"].shape[1])
    params = {name: host[name] for name in ("A_log", "D", "bias")}
    du, ddelta, dz, dBC = (new(*host[name].shape) for name in ("u", "delta", "z", "BC"))
    dB, dC = Columns(dBC, 0, d_state), Columns(dBC, d_state, d_state)

    def forward() -> Any:
        return ops.selective_scan_forward(rows, host["u"], host["delta"], B, C, z, params, "A_log", "D", "bias")

    def backward(saved: Any) -> list[Any]:
        grads.start_step()
        wide_z = Columns(dz, 0, z.width)
        ops.selective_scan_backward(host["dy"], saved, grads, params, du, ddelta, dB, dC, wide_z)
        return [du, ddelta, dz, dBC, *grads.arrays.values()]

    return forward, backward


def check_scan(device: Any, batch: int, L: int, d_inner: int, d_state: int) -> float:
    """Compare the scan with float64 at a small shape; return the largest error of its gradients."""
    data, host = scan_inputs(batch, L, d_inner, d_state)
    wide = {name: array.astype(np.float64) for name, array in host.items()}
    cpu = open_cpu(np.float64)
    params = ("A_log", "D", "bias")
    forward, backward = scan(cpu, GradientBuffers(wide, params), cpu.rows(data), wide, lambda *s: np.empty(s))
    wanted, saved = forward()
    gradients = backward(saved)
    with GpuOps(device, poison=True) as ops:
        arrays = {name: ops.upload(array) for name, array in host.items()}
        grads = GradientBuffers(arrays, params, ops)
        forward, backward = scan(ops, grads, ops.rows(data), arrays, ops.empty)
        y, saved = forward()
        check("scan forward", ops.read(y), wanted, 1e-4)
        return max(
            check("scan backward", ops.read(found), gradient, 1e-3)
            for found, gradient in zip(backward(saved), gradients, strict=True)
        )


def time_scan(device: Any, name: str, shape: tuple[int, int, int, int], repeats: int, calls: int) -> list[dict]:
    """Time the scan forward and backward."""
    data, host = scan_inputs(*shape)
    with GpuOps(device) as ops:
        arrays: dict[str, DeviceArray] = {key: ops.upload(array) for key, array in host.items()}
        grads = GradientBuffers(arrays, ("A_log", "D", "bias"), ops)
        forward, backward = scan(ops, grads, ops.rows(data), arrays, ops.empty)
        _, saved = forward()
        rows = []
        for op, run in (("forward", forward), ("backward", lambda: backward(saved))):
            row = {"op": f"scan {op}", "shape": " x ".join(map(str, shape))}
            rows.append(row | milliseconds(ops, run, repeats, calls))
            print_row(rows[-1])
    return rows


def print_row(row: dict[str, Any]) -> None:
    """Print one line of the table."""
    rate = f"{row['TFLOP/s']:6.2f}" if "TFLOP/s" in row else " " * 6
    times = f"{row['device ms']:9.3f} {row['wall ms']:9.3f} {rate}"
    print(f"{row['op']:<17} {row['shape']:<32} {times}  {row.get('cut', '')}", flush=True)


def summary(rows: list[dict[str, Any]]) -> None:
    """Print each product beside torch and, after a sweep, beside its fastest cut."""
    print(f"\n{'op':<17} {'device ms':>9} {'TFLOP/s':>8} {'torch ms':>9} {'share':>6}  fastest cut")
    for row in rows:
        if not row.get("chosen"):
            continue
        best = min((r for r in rows if r["op"] == row["op"]), key=lambda r: r["device ms"])
        torch_ms = row["torch ms"]
        print(
            f"{row['op']:<17} {row['device ms']:9.3f} {row['TFLOP/s']:8.2f} {torch_ms:9.3f}"
            f" {torch_ms / row['device ms']:6.0%}  {best['device ms']:.3f} {best['cut']}"
        )


def main() -> None:
    """Check, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapter", default="gpu", help="auto, gpu, an adapter's name or its index")
    parser.add_argument("--checks", action="store_true", help="leave WGSL's run-time checks on")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--sweep", choices=("tiles", "splits"), help="time other cuts of each product too")
    parser.add_argument("--only", nargs="*", help="names of products, or scan")
    parser.add_argument("--repeats", type=int, default=7, help="timings of which the median is taken")
    parser.add_argument("--calls", type=int, default=10, help="calls in each timing")
    parser.add_argument("--json", type=Path, help="file for the rows")
    args = parser.parse_args()
    adapter, reason = choose(args.adapter)
    if adapter is None:
        sys.exit(reason)
    device = open_device(adapter, checks=True if args.checks else None)
    print(f"{describe(adapter)}; run-time checks {'on' if device.checks else 'off'}")
    rows: list[dict[str, Any]] = []
    print(f"{'op':<17} {'shape':<32} {'device ms':>9} {'wall ms':>9} {'TFLOP/s':>6}")
    for name, (layout, *sizes) in PRODUCTS.items():
        if not args.only or name in args.only:
            m, n, k = (max(1, size // 32) if args.small else size for size in sizes)
            rows += time_product(device, name, (layout, m, n, k), args.repeats, args.calls, args.sweep)
    if not args.only or "scan" in args.only:
        print(f"scan: largest error of a gradient {check_scan(device, 2, 67, 40, 16):.1e}")
        for name, scan_shape in (SMALL_SCANS if args.small else SCANS).items():
            rows += time_scan(device, name, scan_shape, args.repeats, args.calls)
    summary(rows)
    slug = re.sub(r"\W+", "-", device.name).strip("-").lower()
    path = args.json or Path(__file__).parent / "results" / f"gpu_ops-{slug}{'-small' * args.small}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"adapter": dict(device.info), "checks": device.checks, "host": platform.platform(), "rows": rows}
    path.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    print(f"\n{path}")
    device.close()


if __name__ == "__main__":
    main()
