"""Everything that Dagster loads."""

import dagster as dg

from pipelines import automation, data, evaluation, generation, training
from pipelines.io import Pointers
from pipelines.resources import Accelerator, Storage

storage = Storage.configure_at_launch()

definitions = dg.Definitions(
    assets=[
        data.corpus,
        data.tokenizer,
        data.tokenized_corpus,
        data.token_batches,
        training.weights_mirror,
        training.trained_weights,
        evaluation.perplexity,
        generation.samples,
    ],
    resources={
        "storage": storage,
        "accelerator": Accelerator.configure_at_launch(),
        "io_manager": Pointers(storage=storage),
    },
    jobs=[automation.train, automation.evaluate, automation.smoke],
    schedules=[automation.retrain],
)
