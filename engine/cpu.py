"""What runs a model, or one rank of it, on a CPU: attention, model and runner, the fastest there are for it."""

import logging

from engine.attention.choice import choose_backend
from engine.cache_pool import DTYPES, CachePool
from engine.collective import Collective
from engine.kv_cache import PagedKVCache
from engine.model_runner import ModelRunner
from engine.models.choice import choose_model
from engine.models.loading import LoadedModel
from engine.progress import ProgressWord
from protocol.context import NO_CONTEXT, ContextLayout

log = logging.getLogger(__name__)


def cpu_runner(
    loaded: LoadedModel,
    pool: CachePool,
    progress: ProgressWord,
    collective: Collective | None = None,
    context: ContextLayout = NO_CONTEXT,
) -> ModelRunner:
    """`collective`: where `loaded` is a shard."""
    backend, why = choose_backend(PagedKVCache(pool), DTYPES[loaded.dtype])
    log.info("attention: %s", why)
    model, why = choose_model(loaded.model, backend, progress, collective)
    log.info("model: %s", why)
    return ModelRunner(model, backend, loaded.eos_token_ids, chooses=loaded.shard.is_main, context=context)
