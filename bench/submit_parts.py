"""Where the microseconds of `CudaSwapEngine.submit` and of a short job go, taken apart.

`python bench/submit_parts.py --out FILE.json` needs a CUDA device, CuPy and, for some of the parts,
cuda-bindings. Every part runs once in each round, in an order that changes, with the device idle
before it; figures are microseconds. A part that cannot run is listed with its error.

- host: what a call costs the thread that makes it, every call of a submission;
- device: how long kernels and copies of 16 MiB take between events, and what a wait for another
  stream adds;
- latency: from a call until the host sees that a kernel has started, and from a kernel's end until
  a poll sees it, by flags in page-locked memory;
- job: 16 MiB from the first call until the host knows that it has ended, with more calls each time;
- bindings: the calls to CUDA through CuPy, cuda-bindings and ctypes.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from kv_swap.cuda.registrar import CudaRegistrar
from kv_swap.cuda.swap import LIST_BYTES, SwapKernel, write_list
from kv_swap.cuda.swap_bulk import LOAD_RING, STORE_RING, Ring, bulk_family
from kv_swap.engine import Direction, SwapJob
from kv_swap.memory.arena import HostArena

from bench.bench_swap import KIB, MIB, Bed, scattered
from bench.swap_rows import cuda_torch, machine

SPIN_SECONDS = 1.0
CTAS = (2, 3, 4, 8)
SLEEP_CYCLES = 400_000
"""About 0.2 ms: all that a part queues is queued before the kernel in front of it has ended."""

BINDINGS = {
    "runtime": ("cudaEvent_t", "cudaStream_t", "cuda"),
    "driver": ("CUevent", "CUstream", "cu"),
}
"""Types and prefix of the calls in the modules of cuda-bindings."""

KERNELS = """
extern "C" __global__ void mark(volatile int* flags, int value) { flags[0] = value; }

extern "C" __global__ void gate(volatile int* flags) {
  const long long begin = clock64();
  while (flags[1] == 0 && clock64() - begin < 100000000LL) {
  }
}

extern "C" __global__ void nothing() {}
"""

Call = Callable[[], object]


def now() -> float:
    return time.perf_counter_ns() / 1000


def short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]


def spin(ended: Callable[[], object]) -> None:
    """Ask until the answer is true."""
    deadline = time.monotonic() + SPIN_SECONDS
    while not ended():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not ended after {SPIN_SECONDS} s")


@dataclass
class Parts:
    """What is measured: calls that return microseconds by name, and what they returned."""

    settle: Call
    calls: dict[str, Callable[[], dict[str, float]]] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    keep: list[object] = field(default_factory=list)
    """What lies at the addresses, and behind the handles, that calls use."""

    def add(self, name: str, make: Callable[[], Callable[[], Any]]) -> None:
        """Add a part whose call returns microseconds, or a dict of them."""
        try:
            self.settle()
            call = make()
        except Exception as error:  # noqa: BLE001
            self.failed[name] = short(error)
            return

        def measured() -> dict[str, float]:
            result = call()
            if isinstance(result, dict):
                return {f"{name}: {key}": value for key, value in result.items()}
            return {name: float(result)}

        self.calls[name] = measured

    def add_timed(self, name: str, make: Callable[[], Call]) -> None:
        """Add a part of which the duration of the call counts."""

        def make_timed() -> Callable[[], float]:
            call = make()

            def timed() -> float:
                started = time.perf_counter_ns()
                call()
                return (time.perf_counter_ns() - started) / 1000

            return timed

        self.add(name, make_timed)

    def run(self, rounds: int, seconds: float) -> None:
        """Run all parts `rounds` times, fewer if that takes longer than `seconds`."""
        order = random.Random(0)
        names = list(self.calls)
        deadline = time.monotonic() + seconds
        for index in range(-5, rounds):
            if time.monotonic() > deadline:
                return
            order.shuffle(names)
            for name in list(names):
                try:
                    self.settle()
                    values = self.calls[name]()
                except Exception as error:  # noqa: BLE001
                    self.failed[name] = short(error)
                    names.remove(name)
                    continue
                for key, value in values.items():
                    if index >= 0:
                        self.samples.setdefault(key, []).append(value)

    def report(self, title: str) -> dict[str, Any]:
        rows: dict[str, Any] = {}
        print(f"\n{title:86} {'median':>8} {'p10':>8} {'p90':>8} {'n':>5}")
        for name in self.ordered():
            low, median, high = np.percentile(self.samples[name], (10, 50, 90)).tolist()
            rows[name] = {"median": median, "p10": low, "p90": high, "n": len(self.samples[name])}
            print(f"{name:86} {median:8.2f} {low:8.2f} {high:8.2f} {len(self.samples[name]):5}")
        for name, error in self.failed.items():
            rows.setdefault(name, {})["error"] = error
            print(f"{name:86} {error}")
        return rows

    def ordered(self) -> list[str]:
        """Names of samples in the order in which parts were added."""
        parts = list(self.calls)
        owner = {key: key.split(": ")[0] for key in self.samples}
        return sorted(self.samples, key=lambda key: (parts.index(owner[key]), key))


class Driver:
    """libcuda by ctypes. `keeps_gil`: calls do not give the GIL up."""

    def __init__(self, keeps_gil: bool) -> None:
        library = (ctypes.PyDLL if keeps_gil else ctypes.CDLL)("libcuda.so.1")
        pointer, unsigned = ctypes.c_void_p, ctypes.c_uint
        self.record = self._function(library.cuEventRecord, pointer, pointer)
        self.wait = self._function(library.cuStreamWaitEvent, pointer, pointer, unsigned)
        self.query = self._function(library.cuEventQuery, pointer)
        self.context = self._function(library.cuCtxGetCurrent, pointer)
        self.capturing = self._function(library.cuStreamIsCapturing, pointer, pointer)
        self.launch = self._function(
            library.cuLaunchKernel, pointer, *[unsigned] * 7, pointer, pointer, pointer
        )

    @staticmethod
    def _function(function: Any, *types: Any) -> Any:
        function.argtypes = types
        function.restype = ctypes.c_int
        return function


def succeeds(call: Callable[[], int]) -> Callable[[], int]:
    """Return `call`, which returns a status, having tried it once."""
    status = call()
    if status:
        raise RuntimeError(f"CUDA error {status}")
    return call


class Launch:
    """One launch of a kernel of ours, through each binding."""

    def __init__(self, kernel: SwapKernel, direction: Direction, address: int, stream: Any) -> None:
        import cupy

        launcher: Any = kernel._launchers[direction]
        self.kernel, self.direction, self.address, self.stream = kernel, direction, address, stream
        self.launcher = launcher
        launcher(address, stream.cuda_stream, None)
        self.function = launcher._function.ptr
        self.fixed = launcher._fixed
        self.handle = stream.cuda_stream
        # A copy: whoever launches next writes into the one that the launcher keeps.
        self.arguments = type(launcher._arguments).from_buffer_copy(launcher._arguments)
        first = ctypes.addressof(self.arguments)
        offsets = [getattr(type(self.arguments), n).offset for n, _ in self.arguments._fields_]
        self.pointers = (ctypes.c_void_p * len(offsets))(*(first + o for o in offsets))
        self.parameters = ctypes.addressof(self.pointers)
        self.cupy_launch = cupy.cuda.driver.launchKernel

    def ours(self) -> None:
        self.kernel.launch(self.direction, self.address, self.stream)

    def inner(self) -> None:
        self.launcher(self.address, self.handle, None)

    def cupy(self) -> None:
        self.cupy_launch(self.function, *self.fixed, self.handle, self.parameters, 0)

    def bindings(self) -> Call:
        from cuda.bindings import driver

        function, stream = driver.CUfunction(self.function), driver.CUstream(self.handle)
        launch = driver.cuLaunchKernel
        # What is returned keeps `self`, and with it the memory behind `parameters`.
        return lambda: launch(function, *self.fixed, stream, self.parameters, 0)

    def driver(self, driver: Driver) -> Callable[[], int]:
        launch = driver.launch
        return lambda: launch(self.function, *self.fixed, self.handle, self.parameters, None)


class Subject:
    """Engines of both shapes with their jobs, a compute stream, and raw handles of everything."""

    def __init__(self) -> None:
        self.torch = cuda_torch()
        torch = self.torch
        self.device = torch.device("cuda", 0)
        self.small, self.large = Bed(64 * KIB, 64), Bed(4 * KIB, 1024)
        self.jobs = {way: scattered(way, 64, 8) for way in Direction}
        self.large_jobs = {way: scattered(way, 1024, 512) for way in Direction}
        self.compute, self.copies = torch.cuda.Stream(), torch.cuda.Stream()
        self.other = torch.cuda.Stream()
        self.timing = torch.cuda.Event(enable_timing=True)
        self.plain = torch.cuda.Event()
        for event in (self.timing, self.plain):
            event.record(self.compute)
        self.registrar = CudaRegistrar(self.device)
        self.lists = HostArena(2, LIST_BYTES, register=self.registrar)
        self.list = self.lists.view()
        self.empty_list = HostArena(1, LIST_BYTES, register=self.registrar)
        write_list(self.empty_list.view()[0], np.empty((0, 2), np.int32))
        self.flag_memory = HostArena(1, 4096, register=self.registrar)
        address = self.flag_memory.address
        self.mark = ctypes.c_int32.from_address(address)
        self.gate = ctypes.c_int32.from_address(address + 4)
        self.kernel = SwapKernel(self.small.layout, self.small.arena, self.device)
        torch.cuda.synchronize()

    def settle(self) -> None:
        self.torch.cuda.synchronize()
        self.small.engine.poll()
        self.large.engine.poll()


def host_parts(subject: Subject) -> Parts:
    import cupy

    torch, device = subject.torch, subject.device
    runtime = cupy.cuda.runtime
    parts = Parts(subject.settle)
    add = parts.add_timed
    timing, plain = subject.timing, subject.plain
    compute, copies = subject.compute, subject.copies

    add("nothing", lambda: lambda: None)
    for bed, jobs in ((subject.small, subject.jobs), (subject.large, subject.large_jobs)):
        for way, job in jobs.items():
            count = len(job.pairs)
            add(
                f"check_pairs, {way.value} of {count}",
                lambda e=bed.engine, j=job: lambda: e.check_pairs(j),
            )
        add(f"pairs.copy, {count}", lambda p=job.pairs: p.copy)
        add(
            f"write_list, {count}",
            lambda p=job.pairs: lambda: write_list(subject.list[1], p),
        )
        add(f"SwapJob, {count}", lambda p=job.pairs: lambda: SwapJob(1, Direction.LOAD, p))
    engine = subject.small.engine
    add("ready_slots", lambda: lambda: engine.ready_slots)
    add("time.perf_counter", lambda: time.perf_counter)

    add("current_stream, torch", lambda: lambda: torch.cuda.current_stream(device))
    index = torch.cuda.current_device()
    add(
        "current_stream, torch._C raw",
        lambda: lambda get=torch._C._cuda_getCurrentRawStream: get(index),
    )
    handle = compute.cuda_stream
    add("stream.cuda_stream", lambda: lambda: compute.cuda_stream)
    add("capturing, torch", lambda: torch.cuda.is_current_stream_capturing)
    add("capturing, torch._C", lambda: torch._C._cuda_isCurrentStreamCapturing)
    add(
        "capturing, cupy",
        lambda: lambda ask=runtime.streamIsCapturing: ask(handle),
    )
    add("device, cupy", lambda: runtime.getDevice)
    add("device, torch", lambda: torch.cuda.current_device)
    add("device, torch._C", lambda: torch._C._cuda_getDevice)

    add("record, torch, timing", lambda: lambda: timing.record(compute))
    add("record, torch, no timing", lambda: lambda: plain.record(compute))
    add("wait_event, torch, timing", lambda: lambda: copies.wait_event(timing))
    add("wait_event, torch, no timing", lambda: lambda: copies.wait_event(plain))
    add("wait_stream, torch", lambda: lambda: copies.wait_stream(subject.other))
    add("query, torch", lambda: timing.query)
    add("Event, torch", lambda: lambda: torch.cuda.Event(enable_timing=True))
    add("event.cuda_event, torch", lambda: lambda: timing.cuda_event)
    first = torch.cuda.Event(enable_timing=True)
    first.record(compute)
    timing.record(compute)
    add("elapsed_time, torch", lambda: lambda: first.elapsed_time(timing))

    waiting = copies.cuda_stream
    for name, event in (("timing", timing), ("no timing", plain)):
        raw = event.cuda_event
        add(f"record, cupy, {name}", lambda e=raw: lambda: runtime.eventRecord(e, handle))
        add(
            f"wait_event, cupy, {name}",
            lambda e=raw: lambda: runtime.streamWaitEvent(waiting, e),
        )
    raw = timing.cuda_event
    add("query, cupy", lambda: lambda: runtime.eventQuery(raw))
    add(
        "elapsed_time, cupy",
        lambda: lambda: runtime.eventElapsedTime(first.cuda_event, raw),
    )

    def launch() -> Launch:
        return Launch(subject.kernel, Direction.STORE, subject.empty_list.address, copies)

    add("launch, SwapKernel.launch", lambda: launch().ours)
    add("launch, its launcher alone", lambda: launch().inner)
    add("launch, cupy", lambda: launch().cupy)

    def submit_lane(bed: Bed, job: SwapJob) -> Call:
        lane = bed.engine._state.lanes[job.direction]
        nbytes = len(job.pairs) * bed.layout.slot_bytes
        bed.engine._undelivered += 10_000  # polls take completions of these off
        return lambda: lane.submit(job, nbytes)

    for bed, jobs in ((subject.small, subject.jobs), (subject.large, subject.large_jobs)):
        for way, job in jobs.items():
            what = f"{way.value} of {len(job.pairs)}"
            add(f"Lane.submit, {what}", lambda b=bed, j=job: submit_lane(b, j))
            add(f"engine.submit, {what}", lambda e=bed.engine, j=job: lambda: e.submit(j))
    before = SwapJob(1, Direction.LOAD, subject.jobs[Direction.LOAD].pairs, before_compute=True)
    add("engine.submit before compute, load of 8", lambda: lambda: engine.submit(before))
    add("engine.poll, idle", lambda: engine.poll)

    def poll_ended() -> Callable[[], float]:
        def poll() -> float:
            engine.submit(subject.jobs[Direction.STORE])
            torch.cuda.synchronize()
            started = now()
            engine.poll()
            return now() - started

        return poll

    def poll_running() -> Callable[[], float]:
        def poll() -> float:
            engine.submit(subject.jobs[Direction.STORE])
            started = now()
            engine.poll()
            return now() - started

        return poll

    parts.add("engine.poll, a job has ended", poll_ended)
    parts.add("engine.poll, a job is running", poll_running)
    return parts


def binding_parts(subject: Subject) -> Parts:
    """The same calls through every binding. Last: one that goes wrong may lose the context."""
    import cupy

    runtime = cupy.cuda.runtime
    parts = Parts(subject.settle)
    add = parts.add_timed
    handle, waiting = subject.compute.cuda_stream, subject.copies.cuda_stream
    raw = subject.timing.cuda_event

    def launch() -> Launch:
        return Launch(subject.kernel, Direction.STORE, subject.empty_list.address, subject.copies)

    add("record, cupy", lambda: lambda: runtime.eventRecord(raw, handle))
    add("wait_event, cupy", lambda: lambda: runtime.streamWaitEvent(waiting, raw))
    add("query, cupy", lambda: lambda: runtime.eventQuery(raw))
    add("launch, cupy", lambda: launch().cupy)

    def through_bindings(layer: str, what: str) -> Call:
        module = importlib.import_module(f"cuda.bindings.{layer}")
        event_type, stream_type, prefix = BINDINGS[layer]
        event, stream = getattr(module, event_type)(raw), getattr(module, stream_type)(handle)
        record, wait, query = (
            getattr(module, f"{prefix}{call}")
            for call in ("EventRecord", "StreamWaitEvent", "EventQuery")
        )
        calls: dict[str, Call] = {
            "record": lambda: record(event, stream),
            "wait_event": lambda: wait(stream, event, 0),
            "query": lambda: query(event),
        }
        return calls[what]

    for what in ("record", "wait_event", "query"):
        for layer in BINDINGS:
            name = f"{what}, cuda.bindings {layer}"
            add(name, lambda at=layer, w=what: through_bindings(at, w))

    add("launch, cuda.bindings", lambda: launch().bindings())

    context, status = ctypes.c_void_p(), ctypes.c_int()
    parts.keep += [context, status]
    context_at, status_at = ctypes.addressof(context), ctypes.addressof(status)
    for gil in (False, True):
        name = "ctypes, GIL kept" if gil else "ctypes"
        made: dict[str, Callable[[Driver], Callable[[], int]]] = {
            "record": lambda d: lambda: d.record(raw, handle),
            "wait_event": lambda d: lambda: d.wait(waiting, raw, 0),
            "query": lambda d: lambda: d.query(raw),
            "context": lambda d: lambda: d.context(context_at),
            "capturing": lambda d: lambda: d.capturing(handle, status_at),
            "launch": lambda d: launch().driver(d),
        }
        for what, make in made.items():
            add(f"{what}, {name}", lambda m=make, g=gil: succeeds(m(Driver(g))))

    return parts


def ring_of(ring: Ring, ctas: int) -> Ring:
    return Ring(ctas, ring.stages, ring.tile_bytes, ring.drains)


def device_parts(subject: Subject) -> Parts:
    torch = subject.torch
    parts = Parts(subject.settle)
    stream, compute = subject.copies, subject.compute
    nbytes = 8 * subject.small.layout.slot_bytes

    def between(call: Call, on: Any) -> Callable[[], float]:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def measured() -> float:
            # Behind a kernel that sleeps, so that the host's pace does not count.
            with torch.cuda.stream(on):
                torch.cuda._sleep(SLEEP_CYCLES)
            first.record(on)
            call()
            last.record(on)
            last.synchronize()
            return float(first.elapsed_time(last)) * 1000

        return measured

    entries = {way: index for index, way in enumerate(Direction)}
    for way, index in entries.items():
        write_list(subject.list[index], subject.jobs[way].pairs)
    for way in Direction:
        parts.add(
            f"{way.value}, one contiguous copy",
            lambda w=way: between(
                lambda: subject.small.copy(w, slice(nbytes)), subject.small.streams[w]
            ),
        )
    rings = {
        Direction.STORE: [
            *(ring_of(STORE_RING, ctas) for ctas in CTAS),
            Ring(4, 4, 8 * KIB, 2),
            Ring(8, 4, 4 * KIB, 2),
            Ring(4, 4, 16 * KIB, 2),
        ],
        Direction.LOAD: [
            *(ring_of(LOAD_RING, ctas) for ctas in CTAS),
            Ring(4, 4, 8 * KIB, 1),
            Ring(8, 4, 8 * KIB, 1),
            Ring(4, 12, 16 * KIB, 1),
        ],
    }
    bed = subject.small

    def with_ring(way: Direction, ring: Ring) -> Callable[[], float]:
        families = {
            Direction.STORE: bulk_family(ring, LOAD_RING),
            Direction.LOAD: bulk_family(STORE_RING, ring),
        }
        kernel = SwapKernel(bed.layout, bed.arena, subject.device, families[way])
        address = subject.lists.address + entries[way] * LIST_BYTES
        return between(lambda: kernel.launch(way, address, stream), stream)

    # Compiled at once; CuPy keeps what comes of it on disk. An error comes again below.
    with ThreadPoolExecutor(8) as pool:
        for way, some in rings.items():
            for ring in some:
                pool.submit(with_ring, way, ring)
    for way, some in rings.items():
        for ring in some:
            size = f"{ring.stages} x {ring.tile_bytes // KIB} KiB / {ring.drains}"
            parts.add(
                f"{way.value}, kernel of {ring.ctas} CTAs x {size}",
                lambda w=way, r=ring: with_ring(w, r),
            )

    def waits(event: Any) -> Callable[[], dict[str, float]]:
        times = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        kernel, empty = subject.kernel, subject.empty_list

        def measured() -> dict[str, float]:
            with torch.cuda.stream(compute):
                torch.cuda._sleep(SLEEP_CYCLES)
            times[0].record(compute)
            target = compute
            if event is not None:
                event.record(compute)
                stream.wait_event(event)
                target = stream
            times[1].record(target)
            kernel.launch(Direction.STORE, empty.address, target)
            times[2].record(target)
            times[2].synchronize()
            return {
                "to the next event": float(times[0].elapsed_time(times[1])) * 1000,
                "to an empty kernel's end": float(times[0].elapsed_time(times[2])) * 1000,
            }

        return measured

    parts.add("after compute, same stream", lambda: waits(None))
    parts.add(
        "after compute, other stream, event with timing",
        lambda: waits(torch.cuda.Event(enable_timing=True)),
    )
    parts.add("after compute, other stream, event without", lambda: waits(torch.cuda.Event()))
    return parts


def latency_parts(subject: Subject) -> Parts:
    import cupy

    torch, runtime = subject.torch, cupy.cuda.runtime
    parts = Parts(subject.settle)
    module = cupy.RawModule(code=KERNELS)
    functions = {name: module.get_function(name) for name in ("mark", "gate")}
    for function in functions.values():
        function.compile()
    handles = {name: function.kernel.ptr for name, function in functions.items()}
    stream, compute = subject.copies, subject.compute
    handle, compute_handle = stream.cuda_stream, compute.cuda_stream
    address = ctypes.c_uint64(subject.flag_memory.address)
    value = ctypes.c_int32(1)
    pointers = (ctypes.c_void_p * 2)(ctypes.addressof(address), ctypes.addressof(value))
    parameters = ctypes.addressof(pointers)
    parts.keep += [module, functions, address, value, pointers]

    def launch(name: str) -> None:
        cupy.cuda.driver.launchKernel(handles[name], 1, 1, 1, 1, 1, 1, 0, handle, parameters, 0)

    def starts(before: Call, start: Call) -> Callable[[], dict[str, float]]:
        mark = subject.mark

        def measured() -> dict[str, float]:
            mark.value = 0
            began = now()
            before()
            start()
            returned = now()
            spin(lambda: mark.value)
            seen = now()
            return {"all": seen - began, "from the launch's return": seen - returned}

        return measured

    def by_cupy() -> None:
        launch("mark")

    def wait_torch(event: Any) -> Call:
        def wait() -> None:
            event.record(compute)
            stream.wait_event(event)

        return wait

    def wait_cupy(event: Any) -> Call:
        raw = event.cuda_event

        def wait() -> None:
            runtime.eventRecord(raw, compute_handle)
            runtime.streamWaitEvent(handle, raw)

        return wait

    parts.add("start, launch alone, cupy", lambda: starts(lambda: None, by_cupy))
    for name, event in (("timing", subject.timing), ("no timing", subject.plain)):
        parts.add(
            f"start, record, wait and launch, torch and cupy, {name}",
            lambda e=event: starts(wait_torch(e), by_cupy),
        )
        parts.add(
            f"start, record, wait and launch, cupy, {name}",
            lambda e=event: starts(wait_cupy(e), by_cupy),
        )

    def ends(event: Any, ended: Callable[[], object]) -> Callable[[], float]:
        gate = subject.gate

        def measured() -> float:
            gate.value = 0
            launch("gate")
            event.record(stream)
            until = now() + 30
            while now() < until:
                ended()
            began = now()
            gate.value = 1
            spin(ended)
            return now() - began

        return measured

    # Not through CuPy: what its query leaves behind where an event has not ended, the next call of
    # torch may take for an error.
    for name, event in (("timing", subject.timing), ("no timing", subject.plain)):
        parts.add(f"end, event {name}, torch query", lambda e=event: ends(e, e.query))
    parts.add("end, torch stream.query", lambda: ends(subject.plain, stream.query))
    torch.cuda.synchronize()
    return parts


def job_parts(subject: Subject) -> Parts:
    import cupy

    torch, runtime, bed = subject.torch, cupy.cuda.runtime, subject.small
    parts = Parts(subject.settle)
    stream = subject.copies
    handle = stream.cuda_stream
    nbytes = 8 * bed.layout.slot_bytes
    timing, plain = subject.timing, subject.plain
    rows = {way: index for index, way in enumerate(Direction)}
    for way, index in rows.items():
        write_list(subject.list[index], subject.jobs[way].pairs)

    def timed(*calls: Call) -> Callable[[], dict[str, float]]:
        """Time all calls, the last of which waits."""

        def measured() -> dict[str, float]:
            began = now()
            for call in calls[:-1]:
                call()
            queued = now()
            calls[-1]()
            return {"queued": queued - began, "ended": now() - began}

        return measured

    def memcpy(way: Direction) -> Call:
        device, host = bed.memory.data_ptr(), bed.host.data_ptr()
        target, source = (device, host) if way is Direction.LOAD else (host, device)
        kind = runtime.memcpyDefault
        return lambda: runtime.memcpyAsync(target, source, nbytes, kind, handle)

    def engine_poll() -> None:
        spin(bed.engine.poll)

    def current_raw() -> int:
        raw: int = torch._C._cuda_getCurrentRawStream(0)
        return raw

    for way in Direction:
        name = way.value

        def launch(way: Direction = way) -> Launch:
            address = subject.lists.address + rows[way] * LIST_BYTES
            return Launch(subject.kernel, way, address, stream)

        def by_handles(make: Callable[[], Launch] = launch) -> Any:
            end = torch.cuda.Event()
            end.record(stream)
            start, last = timing.cuda_event, end.cuda_event
            return timed(
                lambda: runtime.eventRecord(start, current_raw()),
                lambda: runtime.streamWaitEvent(handle, start),
                make().cupy,
                lambda: runtime.eventRecord(last, handle),
                lambda: spin(end.query),
            )

        parts.add(
            f"{name}, torch copy_, synchronize",
            lambda w=way: timed(
                lambda: bed.copy(w, slice(nbytes)), lambda: bed.streams[w].synchronize()
            ),
        )
        parts.add(
            f"{name}, torch copy_, stream.query",
            lambda w=way: timed(
                lambda: bed.copy(w, slice(nbytes)), lambda: spin(bed.streams[w].query)
            ),
        )
        parts.add(
            f"{name}, memcpyAsync, stream.query",
            lambda w=way: timed(memcpy(w), lambda: spin(stream.query)),
        )
        parts.add(
            f"{name}, launch, synchronize",
            lambda m=launch: timed(m().cupy, stream.synchronize),
        )
        parts.add(
            f"{name}, launch, record, query",
            lambda m=launch: timed(
                m().cupy, lambda: plain.record(stream), lambda: spin(plain.query)
            ),
        )
        parts.add(
            f"{name}, compute's event, wait, launch, record, query",
            lambda m=launch: timed(
                lambda: timing.record(torch.cuda.current_stream()),
                lambda: stream.wait_event(timing),
                m().cupy,
                lambda: plain.record(stream),
                lambda: spin(plain.query),
            ),
        )
        parts.add(f"{name}, the same by handles", by_handles)
        parts.add(
            f"{name}, engine.submit, engine.poll",
            lambda w=way: timed(lambda: bed.engine.submit(subject.jobs[w]), engine_poll),
        )

        def completed(way: Direction = way) -> Callable[[], float]:
            def measured() -> float:
                bed.engine.submit(subject.jobs[way])
                while not (completions := bed.engine.poll()):
                    pass
                return completions[0].seconds * 1e6

            return measured

        parts.add(f"{name}, seconds of its completion", completed)
    return parts


SECTIONS: dict[str, tuple[Callable[[Subject], Parts], int, float]] = {
    "host": (host_parts, 500, 8.0),
    "latency": (latency_parts, 500, 3.0),
    "device": (device_parts, 500, 8.0),
    "job": (job_parts, 500, 6.0),
    "bindings": (binding_parts, 500, 3.0),
}
"""What makes each, how many rounds it gets, and within how many seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write all figures as JSON here")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    arguments = parser.parse_args()
    if cuda_torch() is None:
        raise SystemExit("needs CuPy and torch with a CUDA device")
    began = time.monotonic()
    subject = Subject()
    document: dict[str, Any] = {"machine": machine(), "job_bytes": 16 * MIB}
    print(f"prepared in {time.monotonic() - began:.1f} s")
    for name in arguments.sections:
        make, rounds, seconds = SECTIONS[name]
        try:
            parts = make(subject)
            parts.run(rounds, seconds)
        except Exception as error:  # noqa: BLE001
            document[name] = {"error": short(error)}
            print(f"{name}: {document[name]['error']}")
            continue
        document[name] = parts.report(name)
        document["seconds"] = time.monotonic() - began
        if arguments.out:
            arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"\n{time.monotonic() - began:.1f} s in all")


if __name__ == "__main__":
    main()
