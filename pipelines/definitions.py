"""Everything that Dagster loads."""

import dagster as dg

from pipelines import adapters, automation, data, evaluation, generation, training, weights
from pipelines.io import Pointers
from pipelines.resources import Accelerator, Storage

storage = Storage.configure_at_launch()

definitions = dg.Definitions(
    assets=[
        data.corpus,
        data.tokenizer,
        data.tokenized_corpus,
        data.token_batches,
        weights.weights_mirror,
        training.trained_weights,
        training.wsla_weights,
        training.lora_adapter,
        adapters.merged_weights,
        evaluation.perplexity,
        evaluation.wsla_perplexity,
        evaluation.lora_perplexity,
        generation.samples,
    ],
    resources={
        "storage": storage,
        "accelerator": Accelerator.configure_at_launch(),
        "io_manager": Pointers(storage=storage),
    },
    jobs=[
        automation.train,
        automation.wsla,
        automation.lora,
        automation.merge,
        automation.evaluate,
        automation.smoke,
    ],
    schedules=[automation.retrain],
)
