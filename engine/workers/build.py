"""Puts engines together whose ranks are processes: workers load their shards while the main process loads its own."""

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engine.cache_pool import CachePool, pool_bytes
from engine.collective import GlooCollective, rendezvous
from engine.cpu import cpu_runner
from engine.engine import Engine
from engine.errors import CollectiveBroken
from engine.geometry import CacheGeometry
from engine.models.loading import LoadedModel, check_model, load_model
from engine.options import EngineOptions
from engine.placing import CPU, Placed, count_chunks, engine_of, place_on_cpu
from engine.progress import ProgressWord
from engine.runner import Runner
from engine.tensor_parallel import Shard
from engine.workers.group import WorkerGroup
from engine.workers.memory import SharedMemory
from engine.workers.messages import Load, Loaded, Ready, Serve
from engine.workers.process import spawn, tell
from engine.workers.runner import SILENCE_S, LocalMainRunner, RemoteMainRunner

LOAD_S = 900.0
"""For a worker to load its shard, from a slow disk."""
OPEN_S = 60.0
"""For the ranks to map their pages and to find each other."""


@dataclass(frozen=True)
class StartedRanks:
    """Of one engine, while its workers load. `collective`: the main rank's, where that one is this process. `meeting`:
    where ranks find each other, if there are several; to be kept until they have."""

    group: WorkerGroup
    world: int
    collective: GlooCollective | None
    meeting: TCPStore | None
    silence_s: float


def build_parallel(options: EngineOptions, head: bool, engines: int = 1, silence_s: float = SILENCE_S) -> list[Engine]:
    """Engines of `options.tp` ranks each. The main rank of the first is this process; all others are workers. They live
    until the engines are closed, or the thread that called this ends. `silence_s`: after which a rank hangs.

    Raises as `build_engine` does, and DeviceLost.
    """
    config = options.batching
    check_model(options.model, options.tp)
    ranks = engines * options.tp
    threads = options.threads or max(1, torch.get_num_threads() // ranks)
    torch.set_num_threads(threads)
    with ExitStack() as undo:
        with_workers = range(1 if options.tp == 1 else 0, engines)
        started = [_start(options, head, threads, number, silence_s, undo) for number in with_workers]
        loaded = load_model(options.model, options.dtype, head, Shard(0, options.tp))
        context = loaded.context(options.context)
        for each in started:
            each.group.wait_for(Loaded, LOAD_S)
        geometry = loaded.geometry(config.page_size)
        use = loaded.sizes.on_cpu(geometry, config.request_cap, bool(config.use_async_batching))
        chunks = count_chunks(use, config, CPU, ranks)
        placed = []
        for each in started:
            placed.append(_open(each, options, loaded, geometry, chunks))
            undo.callback(placed[-1].runner.close)
        if options.tp == 1:
            placed.insert(0, place_on_cpu(loaded, config, sharers=ranks, context=context))
        built = [engine_of(loaded, config, each, ranks, context) for each in placed]
        undo.pop_all()
    return built


def _start(
    options: EngineOptions, head: bool, threads: int, number: int, silence_s: float, undo: ExitStack
) -> StartedRanks:
    """The first engine's main rank is local."""
    world, meeting = options.tp, rendezvous() if options.tp > 1 else None
    collective = GlooCollective(meeting.port, Shard(0, world), silence_s) if meeting and number == 0 else None
    workers = []
    for rank in range(1 if collective else 0, world):
        worker = spawn(f"engine {number} rank {rank}", Shard(rank, world), silence_s)
        undo.callback(worker.end)
        workers.append(worker)
        load = Load(
            model=str(options.model.absolute()),
            dtype=options.dtype,
            head=head,
            rank=rank,
            world=world,
            port=meeting.port if meeting else None,
            threads=threads,
            silence_s=silence_s,
            context=list(options.context),
        )
        tell([worker], load)
    group = WorkerGroup(workers)
    undo.callback(group.close, 0.0)
    group.start()
    return StartedRanks(group, world, collective, meeting, silence_s)


def _open(
    started: StartedRanks, options: EngineOptions, loaded: LoadedModel, geometry: CacheGeometry, chunks: int
) -> Placed:
    config, group, world, collective = options.batching, started.group, started.world, started.collective
    memory = SharedMemory.create(world, pool_bytes(geometry, chunks))
    try:
        pool = CachePool(
            geometry, chunks, config.debug_pages, ranks=world, memory=memory.pools(), file=memory.pools_file()
        )
        progress = ProgressWord(memory.word())
        group.tell(Serve(config.page_size, chunks), [memory.fd])
    finally:
        memory.close()
    runner: Runner
    if collective:
        try:
            collective.join()
        except CollectiveBroken as error:
            raise group.why_lost(error) from error
        main = cpu_runner(loaded, pool, progress, collective, loaded.context(options.context))
        runner = LocalMainRunner(group, main, collective)
    else:
        runner = RemoteMainRunner(group, progress, bool(config.use_async_batching), started.silence_s)
    group.wait_for(Ready, OPEN_S)
    return Placed(pool, progress, runner, bool(config.use_async_batching))
