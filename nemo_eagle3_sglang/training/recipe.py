"""The EAGLE-3 recipe of AutoModel with its target behind the backend registry; the only importer of nemo_automodel.

Everything that trains (draft model, optimizer, schedule, data, checkpoints, logging) is AutoModel's
``TrainEagle3Recipe``. Overridden here: checks before any weights load, where the target comes from, the draft's
config.json, and what the run reports and refuses to save. Least coupling was the rule: no copy of the training loop.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from nemo_automodel._transformers.auto_tokenizer import NeMoAutoTokenizer
from nemo_automodel.components.checkpoint.utils import find_latest_checkpoint, resolve_restore_from_to_checkpoint_dir
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.components.datasets.llm.chat_dataset import ChatDataset
from nemo_automodel.components.speculative.eagle.core import Eagle3TrainerModule, simulated_accept_length
from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel
from nemo_automodel.components.speculative.eagle.registry import EAGLE3_DRAFT_REGISTRY, DraftSpec
from nemo_automodel.components.utils import flops_utils
from nemo_automodel.recipes.llm import train_eagle3
from nemo_automodel.recipes.llm.train_eagle3 import TrainEagle3Recipe
from tqdm import tqdm
from transformers import PretrainedConfig

from nemo_eagle3_sglang import backends
from nemo_eagle3_sglang.config.load import validate
from nemo_eagle3_sglang.config.schema import Config, RecipeArgs
from nemo_eagle3_sglang.contracts import AuxPlan, BackendRequest
from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.supervision.backend import RunnerBackend
from nemo_eagle3_sglang.supervision.unroll import Unroll
from nemo_eagle3_sglang.training import chat_data, draft_registry, preflight, record, resume, target
from nemo_eagle3_sglang.training.ahead import AheadLoader, Submitted
from nemo_eagle3_sglang.training.export import make_servable, serve_command
from nemo_eagle3_sglang.training.flops import StepFlops, peak_flops
from nemo_eagle3_sglang.training.meter import RunMeter, TimedLoader
from nemo_eagle3_sglang.training.optimizer import fuse
from nemo_eagle3_sglang.training.trainer import FlatTrainer

logger = logging.getLogger(__name__)

# Rows rendered before the run to see whether the assistant mask marks anything.
MASK_SAMPLE = 32
DRAFTS = draft_registry.Drafts(EAGLE3_DRAFT_REGISTRY, DraftSpec, LlamaEagle3DraftModel)


class FlatEagle3Trainer(FlatTrainer, Eagle3TrainerModule):
    """AutoModel's trainer module (parameters, buffers, checkpoint keys) with this package's ``forward``."""


class TrainEagle3SGLangRecipe(TrainEagle3Recipe):
    """AutoModel's EAGLE-3 recipe over any registered target backend.

    Backends that AutoModel builds itself (``colocated``, ``vllm``, ``remote``) go its own way, with the same checks
    and the same reports.
    """

    def setup(self) -> None:
        """Check everything, then build target, draft, data, optimizer and checkpointer.

        Raises:
            ConfigError: Whatever the user can mend; raised before any weights load and before anything is written.
        """
        config = validate(self.cfg.to_dict())
        self._backend = config.recipe_args.target_model_backend
        self.target_wrapper = None
        self._aux_plan: AuxPlan | None = None
        self._position: resume.Position | None = None
        draft = check_run(config)
        trainer = preflight.choose_trainer(config, DRAFTS.is_llama(draft))
        device = preflight.check_device(config.recipe_args.device)
        metrics = Path(config.recipe_args.output_dir) / "metrics.jsonl" if os.environ.get("RANK", "0") == "0" else None
        self.meter = RunMeter(metrics, device, peak_flops(device))
        self._flops: StepFlops | None = None
        self._record = partial(record.write, config, trainer, device)
        # AutoModel seeds its generators after the draft has drawn its first weights: two runs would never be equal.
        torch.manual_seed(config.recipe_args.shuffle_seed)
        try:
            with DRAFTS.building(draft):
                super().setup()
        except BaseException:
            if self.target_wrapper is not None:
                self.target_wrapper.close()
            raise
        if trainer == "flat":
            # Only forward differs, so the module that AutoModel has built, and wrapped for DDP, becomes ours in place.
            self._module().__class__ = FlatEagle3Trainer
            fuse(self.optimizer)
            flops = step_flops(config.recipe_args, self.draft_model)
            self._flops = flops if flops is not None and flops.checked() else None
        # At least two log points, so that also a short run says how the loss moved.
        self.log_every_steps = min(self.log_every_steps, max(1, self.total_optim_steps // 2))
        if self.target_wrapper is not None and not config.recipe_args.parallel_drafting:
            ids = self._aux_plan.written if self._aux_plan else self.target_wrapper.aux_layer_ids
            trained = self._aux_plan.trained if self._aux_plan else ids
            make_servable(self.draft_model.config, ids, config.recipe_args.capture, trained, self.compute_dtype)

    def _setup_online_target(self, recipe_cfg: ConfigNode, target_path: str, draft_base_config: Any) -> Any:
        """Lead a registered backend to :meth:`_setup_sglang_target`.

        AutoModel checks the name against its own four first; under the name ``sglang`` it calls the one method that
        is overridden here, and refuses packing, since its own backend would take a packed row for one sequence. Only
        this view of the configuration says so, not what is saved with the checkpoint: the training data is packed as
        the YAML says, validation rows are padded.
        """
        if backends.is_registered(self._backend):
            view = {"target_model_backend": "sglang", "packed_sequence_size": 0}
            recipe_cfg = ConfigNode({**recipe_cfg.to_dict(), **view})
        return super()._setup_online_target(recipe_cfg, target_path, draft_base_config)

    def _setup_sglang_target(self, recipe_cfg: ConfigNode, target_path: str) -> None:
        """Open the selected backend's target and put the supervision contract over it."""
        args = validate(self.cfg.to_dict()).recipe_args
        request = target.backend_request(args, torch.device(self.device), dtype=self.compute_dtype)
        self.target_model = None
        minutes = self.cfg.get("dist_env", {}).get("timeout_minutes", 30)
        source = target.open_source(args, request, self.dist_env.world_size, 60.0 * minutes)
        try:
            self._aux_plan = target.plan_aux_layers(source, args.aux_layer_ids)
            self.target_wrapper = RunnerBackend(source, self._aux_plan.trained)
        except BaseException:
            source.close()
            raise

    def _build_train_dataloader(self, data_path: Any, split: str | None) -> Any:
        """Let padding be padding where the tokenizer's pad id is 0.

        ``ChatDataset`` takes ``pad_token_id or eos_token_id``, so that 0 becomes the end-of-sequence id and
        the attention mask all ones: the loss is right, but the target would run over every padding token.
        """
        loader = super()._build_train_dataloader(data_path, split)
        if self.tokenizer.pad_token_id == 0 and hasattr(loader.dataset, "pad_token_id"):
            loader.dataset.pad_token_id = 0
        args = self.cfg.recipe_args
        loader = resume.resumable(
            loader,
            seed=args.get("shuffle_seed", 42),
            accumulation=args.get("grad_accumulation_steps", 1),
            step=lambda: self.runtime.global_step,
        )
        loader = TimedLoader(loader, self.meter)
        if not self._is_ours():
            return loader
        ahead = target.batches_ahead(validate(self.cfg.to_dict()).recipe_args, self.dist_env.world_size)
        return AheadLoader(loader, self._submit, ahead) if ahead else loader

    def _is_ours(self) -> bool:
        return backends.is_registered(self._backend)

    def _submit(self, batch: dict[str, torch.Tensor]) -> Unroll | None:
        """Have the target begin with the next micro-batch, where trainer and target can; see ``ahead.py``."""
        if getattr(self, "trainer_module", None) is None:
            # AutoModel reads all batches once to choose the draft vocabulary.
            return None
        module, wrapper = self._module(), self.target_wrapper
        if isinstance(module, FlatTrainer) and isinstance(wrapper, RunnerBackend) and wrapper.works_ahead:
            return wrapper.submit(batch, module.ttt_steps)
        return None

    def _resolve_prefetch_depth(self, recipe_cfg: ConfigNode) -> int:
        """Keep AutoModel's own prefetching off where ``AheadLoader`` does it."""
        return 0 if self._is_ours() else super()._resolve_prefetch_depth(recipe_cfg)

    def _forward_batch(self, batch: dict[str, torch.Tensor], target_batch: Any = None) -> Any:
        """Run target and draft on a batch of the data loader.

        The batch is still on the host, where counting and laying it out costs no synchronisation.
        """
        if self.trainer_module.training:
            # Ranks get as many rows; counting each rank's own tokens would be a collective a step.
            self.meter.count(int(batch["attention_mask"].sum()) * self.dist_env.world_size)
        if not isinstance(self.target_wrapper, RunnerBackend):
            return super()._forward_batch(batch, target_batch)
        module = self._module()
        if isinstance(module, FlatTrainer):
            with self.meter.target():
                flat = (
                    self.target_wrapper.collect(batch.plan)
                    if isinstance(batch, Submitted)
                    else self.target_wrapper.flat_batch(batch, module.ttt_steps)
                )
            if self._flops is not None and self.trainer_module.training:
                self.meter.add_flops(self._flops.count(flat.unroll))
            return self.trainer_module(flat)
        with self.meter.target():
            padded = self.target_wrapper.generate_batch(**batch)
        return self.trainer_module(**padded.to_trainer_inputs())

    def _run_eval(self) -> tuple[torch.Tensor, torch.Tensor, float | None] | None:
        """Evaluate; a batch counts by its supervised positions, over all ranks.

        AutoModel takes the mean of the ranks' means of batches, in which one without supervision is a loss of 0.
        """
        if self.val_dataloader is None or self.cfg.recipe_args.get("parallel_drafting", False):
            return super()._run_eval()
        self.trainer_module.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        steps = torch.zeros((2, self._module().ttt_steps), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for batch in tqdm(self.val_dataloader, "Validation", leave=False, disable=not self.dist_env.is_main):
                found = self._forward_batch(batch)
                count = found.valid_tokens
                sums += torch.stack((found.loss * count, found.accuracy * count, count)).double()
                steps += torch.stack((found.step_prefix_hits, found.step_valid)).double()
        self.trainer_module.train()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
            torch.distributed.all_reduce(steps)
        loss, accuracy = (sums[:2] / sums[2].clamp_min(1)).float()
        self.meter.accepted(*steps)
        return loss, accuracy, simulated_accept_length(*steps).item() if bool(steps[1].sum()) else None

    def _make_progress_bar(self, total: int | None = None, initial: int = 0) -> Any:
        """Keep AutoModel's bar, so that tokens/s and the accept length can be shown on it."""
        self.meter.bar = super()._make_progress_bar(total=total, initial=initial)
        evaluated = self._position is None or not self._position.epoch_done
        self.meter.resume(initial, self._position and self._position.tokens, evaluated)
        self.meter.restart()
        return self.meter.bar

    def _wandb_log(self, data: dict[str, Any], step: int) -> None:
        """Take every log point (AutoModel calls this on rank 0 whether W&B is on or not)."""
        super()._wandb_log(self.meter.log(data, step), step)

    def _save_extra_state(self, path: str, epoch: int) -> None:
        """Write the position in the data as well; AutoModel publishes a checkpoint only when this is through."""
        super()._save_extra_state(path, epoch)
        # A cached target's loader (cached_target_path) is AutoModel's own, and starts a resumed epoch afresh.
        if isinstance(sampler := self.train_dataloader.sampler, resume.ResumableSampler):
            resume.write(Path(path), sampler.position(epoch, self.meter.tokens))

    def _load_extra_state(self, ckpt_dir: str) -> None:
        """Go on in the data where the checkpoint stands."""
        super()._load_extra_state(ckpt_dir)
        if isinstance(sampler := self.train_dataloader.sampler, resume.ResumableSampler):
            self._position = resume.restore(Path(ckpt_dir), sampler)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save, unless the draft holds inf or nan: such a checkpoint would be resumed and served like any other.

        Raises:
            FloatingPointError: The draft diverged, or the target's states were not finite.
        """
        # One flag for all parameters, so that the device is waited for once a checkpoint.
        draft = self._module().draft_model
        finite = torch.stack([parameter.detach().isfinite().all() for parameter in draft.parameters()])
        if not bool(finite.all()):
            raise FloatingPointError(
                f"step {self.runtime.global_step}: the draft's weights are not finite, no checkpoint is saved. Lower "
                "optimizer.lr, or look for inf/nan in the target's states; earlier checkpoints can be resumed"
            )
        super().save_checkpoint(*args, **kwargs)

    def run_train_validation_loop(self) -> None:
        """Train, then say what came out, where it is and how to serve it."""
        start = self.runtime.global_step
        trained_epochs = self._resume_epoch + (self._position is not None and self._position.epoch_done)
        if start and self.total_optim_steps <= start and trained_epochs < self.num_epochs:
            self._finalize_training()
            raise ConfigError(
                f"the checkpoint in recipe_args.output_dir is at step {start}, past the {self.total_optim_steps} steps "
                "of this run (other data or batch size?): choose another output_dir, or raise recipe_args.num_epochs"
            )
        if self.dist_env.is_main:
            self._record(self.dist_env.world_size, start)
        with self.meter.keep_acceptance(train_eagle3):
            super().run_train_validation_loop()
        if self.dist_env.is_main:
            self._report(start)

    def _report(self, start: int) -> None:
        if self.runtime.global_step == start:
            print(
                f"\nNothing was trained: all {self.num_epochs} epochs were done before, at step {start}. "
                "Raise recipe_args.num_epochs, or choose another output_dir."
            )
        elif summary := self.meter.summary():
            print(f"\nTrained{f' from step {start}' if start else ''}: {summary}")
        if not self.checkpoint_config.enabled:
            return
        latest = find_latest_checkpoint(self.checkpoint_config.checkpoint_dir)
        draft = Path(str(latest)) / "model" / "consolidated" if latest else None
        if draft is not None and draft.is_dir():
            target = self.cfg.recipe_args.target_model_name_or_path
            target = str(Path(target).resolve()) if Path(target).is_dir() else target
            print(f"Draft: {draft}")
            if served_by_sglang(self.cfg.recipe_args.get("capture", "serving"), self._aux_plan):
                print(f"Serve it:\n{serve_command(target, str(draft))}")
            else:
                print(
                    "It is trained on the residual stream (recipe_args.capture: residual), and nothing has checked "
                    "that SGLang serves that: serve it with an engine that captures these layers' outputs, e.g. vLLM."
                )
        elif latest:
            print(f"Checkpoint: {latest} (no consolidated export; set checkpoint.save_consolidated: true)")


def served_by_sglang(capture: str, plan: AuxPlan | None) -> bool:
    """Return whether the run made sure that SGLang serves the draft with what it was trained on."""
    return capture == "serving" or plan is None


def step_flops(args: RecipeArgs, draft: torch.nn.Module) -> StepFlops | None:
    """Return a counter of FLOPs, or ``None`` where AutoModel has no formula of the target's own architecture."""
    config = preflight.load_target_config(args).get_text_config()
    formula = flops_utils.get_flops_formula_for_hf_config(config)
    if formula is flops_utils.transformer_flops:
        return None
    return StepFlops(formula, config, draft)


def check_run(config: Config) -> draft_registry.Choice:
    """Run all checks, the cheap ones first, and return the draft; nothing is written.

    Raises:
        ConfigError: See ``preflight.py``, ``chat_data.py`` and ``engine.check_request``.
    """
    args = config.recipe_args
    ours = preflight.is_ours(args)
    if ours:
        process = target.choose_process(args, preflight.world_size())
        _check_features(args)
    device = preflight.check_device(args.device)
    target_config = preflight.load_target_config(args)
    preflight.check_target(args, target_config)
    draft = DRAFTS.choose(args, target_config)
    if (obstacle := preflight.flat_obstacle(config, DRAFTS.is_llama(draft))) and args.trainer == "flat":
        raise ConfigError(f"recipe_args.trainer: flat is not possible, {obstacle}; write automodel or auto")
    _check_data(args, target_config.get_text_config().vocab_size)
    if ours:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        # Another environment's engine checks for itself, and may be the only one.
        if process == "inline" or args.sglang_python is None:
            _check_backend(target.backend_request(args, device, dtype), args.target_model_backend)
    preflight.check_output_dir(args.output_dir)
    checkpoint = config.checkpoint
    if checkpoint is not None and checkpoint.enabled and checkpoint.checkpoint_dir is not None:
        preflight.check_output_dir(checkpoint.checkpoint_dir, "checkpoint.checkpoint_dir")
    _check_resume(config, target_config.get_text_config())
    return draft


def _check_resume(config: Config, text: PretrainedConfig) -> None:
    """Refuse to go on from the checkpoint of another draft; AutoModel resumes whatever it finds."""
    checkpoint = config.checkpoint
    if checkpoint is not None and not checkpoint.enabled:
        return
    root = (checkpoint and checkpoint.checkpoint_dir) or str(Path(config.recipe_args.output_dir) / "checkpoints")
    wanted = checkpoint and checkpoint.restore_from
    found = resolve_restore_from_to_checkpoint_dir(root, wanted) if wanted else find_latest_checkpoint(root)
    if found is None:
        return
    if not Path(str(found)).is_dir():
        raise ConfigError(f"checkpoint.restore_from: there is no checkpoint {found}")
    for change in preflight.check_resume(Path(str(found)), config.recipe_args, text):
        logger.warning("Resuming from %s with another %s", found, change)


def _check_features(args: RecipeArgs) -> None:
    """Refuse what AutoModel would refuse after the target has been loaded."""
    backend = args.target_model_backend
    if args.parallel_drafting:
        raise ConfigError(
            f"recipe_args.parallel_drafting: true needs full logits, which target_model_backend: {backend} does not "
            "give; write false, or target_model_backend: colocated"
        )
    if not args.freeze_embeddings and args.capture == "serving":
        logger.warning(
            "recipe_args.freeze_embeddings: false trains embeddings that SGLang replaces by the target's when it serves"
        )
    target.batches_ahead(args, preflight.world_size())


def _check_backend(request: BackendRequest, backend: str) -> None:
    """Ask the factory's module for its own checks, where it has a ``check_request``."""
    factory = backends.load(backend)
    module = __import__(factory.__module__, fromlist=["check_request"])
    check = getattr(module, "check_request", None)
    if check is not None:
        check(request)


def _check_data(args: RecipeArgs, vocab_size: int) -> None:
    tokenizer = _load_tokenizer(args)
    for key, paths in (("train_data_path", args.train_data_path), ("val_data_path", args.val_data_path)):
        if paths is None:
            continue
        files = chat_data.local_files(f"recipe_args.{key}", paths)
        chat_data.check_files(f"recipe_args.{key}", files)
        if files:
            _check_mask(f"recipe_args.{key}", chat_data.sample(key, files, MASK_SAMPLE), tokenizer, args, vocab_size)


def _load_tokenizer(args: RecipeArgs) -> Any:
    key, target = "recipe_args.target_model_name_or_path", args.target_model_name_or_path
    try:
        tokenizer = NeMoAutoTokenizer.from_pretrained(target, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{key}: the tokenizer of {target!r} cannot be loaded: {reason}") from error
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{key}: the tokenizer of {target} has no chat template; put a chat_template.jinja beside it, "
            "with {% generation %} … {% endgeneration %} around the assistant's text"
        )
    return tokenizer


def _check_mask(key: str, rows: list[Mapping[str, Any]], tokenizer: Any, args: RecipeArgs, vocab_size: int) -> None:
    """Render a few rows as the training will; refuse a mask that marks no token, and tokens that the target lacks."""
    if not any(chat_data.has_answer(row) for row in rows):
        raise ConfigError(f"{key}: none of the first {len(rows)} rows has an assistant turn, and only those are learnt")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        dataset = ChatDataset(
            str(path),
            tokenizer=tokenizer,
            seq_length=args.packed_sequence_size or args.seq_length,
            padding="do_not_pad",
            truncation=True,
            unshifted=True,
            mask_reasoning_content=args.mask_reasoning_content,
        )
        try:
            samples = [dataset[i] for i in range(len(dataset))]
        except (ValueError, KeyError, TypeError, AssertionError, TemplateError) as error:
            raise ConfigError(f"{key}: a row cannot be rendered with the target's chat template: {error}") from error
    largest = max(max(sample["input_ids"], default=0) for sample in samples)
    if largest >= vocab_size:
        raise ConfigError(
            f"{key}: the tokenizer of {args.target_model_name_or_path} gives token {largest}, the target has "
            f"{vocab_size}; use the target's own tokenizer, without tokens added to it"
        )
    if any(sum(sample["loss_mask"]) for sample in samples):
        return
    name, length = "packed_sequence_size", args.packed_sequence_size
    if not length:
        name, length = "seq_length", args.seq_length
    cut = all(len(sample["input_ids"]) >= length for sample in samples)
    cause = (
        f"every prompt fills {name} {length}; raise it"
        if cut
        else "the chat template marks no assistant text: put {% generation %} … {% endgeneration %} around it in "
        f"{args.target_model_name_or_path}'s chat_template"
    )
    raise ConfigError(f"{key}: in the first {len(rows)} rows no token would be trained on; {cause}")


def run_recipe(config: dict[str, Any]) -> None:
    """Train with a configuration as a plain mapping (YAML and overrides merged)."""
    recipe = TrainEagle3SGLangRecipe(ConfigNode(config))
    recipe.setup()
    recipe.run_train_validation_loop()
