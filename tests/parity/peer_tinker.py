"""Run by tinker's own interpreter: its Datum and KL metrics on a dict that rlbatch made."""

import tinker
from peer_io import answer
from tinker_cookbook.rl.metrics import compute_kl_sample_train


def compute(question):
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(datum["model_input"]),
            loss_fn_inputs={
                key: tinker.TensorData.from_torch(values) for key, values in datum["loss_fn_inputs"].items()
            },
        )
        for datum in question["form"]["data"]
    ]
    metrics = compute_kl_sample_train(data, question["trainer_logprobs"])
    return {"v1": metrics["optim/kl_sample_train_v1"], "v2": metrics["optim/kl_sample_train_v2"]}


answer(compute)
