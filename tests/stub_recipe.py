"""A recipe that only meets the other ranks and then does as ``STUB_DO`` says, for runs of several real processes.

Python imports ``sitecustomize`` at every start, so the launcher and the command line are the real ones and AutoModel,
20 seconds a process, is not imported.
"""

from pathlib import Path

import yaml

SITECUSTOMIZE = """
import atexit, os, signal, sys, time, types

def run_recipe(config):
    import torch
    import torch.distributed as dist
    from nemo_eagle3_sglang.errors import ConfigError

    dist.init_process_group(config["dist_env"]["backend"])
    atexit.register(dist.destroy_process_group)  # as AutoModel does
    rank, total = dist.get_rank(), torch.ones(1)
    dist.all_reduce(total)
    line = f"rank {rank} of {total.item():.0f} at {os.environ['MASTER_ADDR']}: {config['recipe_args']['output_dir']}\\n"
    os.write(1, line.encode())  # at once, or the lines of two processes mix
    with open(f"{os.environ['STUB_FOLDER']}/{rank}.pid", "w") as file:
        file.write(str(os.getpid()))
    do = os.environ.get("STUB_DO")
    if do == "all ranks refuse":
        raise ConfigError("nobody can do this")
    if do == "rank 1 refuses" and rank == 1:
        raise ConfigError("I cannot do this")
    if do == "rank 1 crashes" and rank == 1:
        raise RuntimeError("boom")
    if do == "rank 1 is killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if do is not None:
        time.sleep(120)

module = types.ModuleType("nemo_eagle3_sglang.training.recipe")
module.run_recipe = run_recipe
sys.modules[module.__name__] = module
"""

CONFIG = {
    "recipe": "nemo_eagle3_sglang.training.recipe.TrainEagle3SGLangRecipe",
    "recipe_args": {
        "target_model_name_or_path": "target",
        "target_model_backend": "hf",
        "trust_remote_code": False,
        "train_data_path": "train.jsonl",
        "output_dir": "out",
        "seq_length": 64,
        "micro_batch_size": 1,
        "num_epochs": 1,
        "ttt_steps": 2,
    },
    "optimizer": {"lr": 1.0e-3},
}


def write(folder: Path) -> tuple[Path, dict[str, str]]:
    """Write stub and configuration into ``folder``; return the configuration's path and the environment it needs.

    Each rank writes its process id to ``folder/<rank>.pid``; temporary files go to ``folder/tmp``.
    """
    (folder / "site").mkdir()
    (folder / "tmp").mkdir()
    (folder / "site/sitecustomize.py").write_text(SITECUSTOMIZE)
    (folder / "stub.yaml").write_text(yaml.safe_dump(CONFIG))
    environment = {
        "PYTHONPATH": str(folder / "site"),
        "STUB_FOLDER": str(folder),
        "TMPDIR": str(folder / "tmp"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    return folder / "stub.yaml", environment
