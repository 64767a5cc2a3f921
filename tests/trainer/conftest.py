"""Trees and trainers for the tests of this folder."""

import pytest

from tests.trainer.helpers import some_trees, tiny_model
from treewise.trainer import TreeTrainer, TreeTrainingArguments


@pytest.fixture
def trees():
    return some_trees()


@pytest.fixture
def make_trainer(tmp_path):
    def make(dataset, *, model=None, callbacks=None, eval_dataset=None, folder="run", **settings):
        settings = {
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "cosine",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
            "seed": 3,
            **settings,
        }
        return TreeTrainer(
            tiny_model() if model is None else model,
            TreeTrainingArguments(output_dir=str(tmp_path / folder), **settings),
            train_dataset=dataset,
            eval_dataset=eval_dataset,
            callbacks=callbacks,
        )

    return make
