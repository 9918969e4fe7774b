"""Keys of RLinf's configs that are not converted, and why, as read in its code at commit a3816b59 (2026-08-22)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DEAD = {
    "algorithm.kl_beta": "robots have no reference policy there (here: algorithm.kl_coef)",
    "algorithm.kl_penalty": "read for language models only",
    "algorithm.normalize_advantages": "not read: advantages are always normalised there, per rank",
    "algorithm.loss_agg_func": "not read: the loss is always a mean over valid tokens",
    "algorithm.clip_ratio_c": "dual clipping is passed on for GR00T N1.6, N1.7 and asynchronous PPO only",
    "algorithm.reward_coef": "not read: the factor is env.train.reward_coef",
    "algorithm.use_fixed_reset_state_ids": "not read: env.train has the setting",
    "rollout.backend": "not read for robots: training always infers with Hugging Face's models",
    "rollout.generation_backend": "not read for robots: training always infers with Hugging Face's models",
    "rollout.rollout_backend": "read by RLinf's evaluation only, which can infer with SGLang",
    "rollout.recompute_logprobs": "not read for robots (here: algorithm.old_logprobs)",
    "rollout.unnorm_key": "not read: actor.model has the setting",
    "algorithm.staleness_threshold": "read by asynchronous PPO only",
    "algorithm.behave_weight_threshold": "read by asynchronous PPO only",
    "env.enable_offload": "not read: env.train and env.eval have the setting",
    "runner.eval_policy_path": "not read",
    "runner.num_updates_per_step": "not read",
    "actor.model.hidden_dim": "not read: the layers of the MLP are fixed to 256, 256, 256",
    "actor.model.vh_mode": "not read",
    "actor.model.center_crop": "put into the model's config, where nothing reads it: images are resized as a whole",
}
"""Without effect in RLinf, for robots on FSDP: documented or shipped keys that no code
reads. Each counts as such only if it is not converted."""

ANY = ("any",)
"""Stands for every value."""


@dataclass(frozen=True)
class Note:
    """What a key means here that no setting takes over."""

    why: str
    """Reason why there is nothing to set, for `values`."""
    values: tuple[Any, ...] = ANY
    """Values that mean what is done here anyway; a key without a value, or with null, always does."""
    otherwise: str = ""
    """What is said of other values, which have no exact counterpart; empty: the same."""

    def of(self, value: Any) -> tuple[bool, str]:
        """Return whether there is nothing to set for this value, and the reason."""
        if self.values is ANY or any(value == known and type(value) is type(known) for known in self.values):
            return True, self.why
        return (True, NOT_GIVEN) if value in ABSENT else (False, self.otherwise or self.why)


ABSENT = (None, "", "None")
"""Values that give none."""
NOT_GIVEN = "not given"


def never(otherwise: str) -> Note:
    """Return the note of keys that have no exact counterpart, whatever their value."""
    return Note("", (), otherwise)


def only_if(value: Any, why: str, otherwise: str = "") -> Note:
    """Return the note of a key that asks for nothing with this value."""
    return Note(why, (value,), otherwise)


_FSDP = "engine.parallel.backend chooses between replicas, fsdp and hsdp by memory"
_REWARD_MODEL = "part of the learned reward"
_STARTS = "start states follow from seed, env and episode"
_SUCCESS = "an evaluation counts the episodes that succeed at any time"
_RECORDED = "episodes are recorded with `embodyrl collect`"

NOTES: dict[str, Note] = {
    "*.group_name": Note("processes have no names to choose"),
    "runner.task_type": Note("the task follows from the other settings"),
    "runner.logger.log_path runner.logger.project_name": Note("a run's folder is runs/<name>/<time>, or run.dir"),
    "runner.only_eval": only_if(False, "off", "what is written here trains; evaluate with `embodyrl eval CHECKPOINT`"),
    "runner.resume_dir": never("a run continues with `embodyrl resume RUN`"),
    "runner.ckpt_path": never("weights to start from are model.checkpoint; evaluate with `embodyrl eval CHECKPOINT`"),
    "runner.max_steps": Note("iterations are the only limit, run.iterations"),
    "runner.weight_sync_interval": only_if(1, "rollouts act with the newest weights"),
    "actor.optim.critic_warmup_steps": never("the policy learns from the first step here, as the critic does"),
    "cluster.*": Note("processes are placed by `placement` and engine.parallel.world_size; `embodyrl plan` shows how"),
    "actor.model.precision": Note("small models compute in float32", ("32", "fp32", 32)),
    "actor.model.is_lora": only_if(False, "off", "small models learn with all weights"),
    "actor.model.lora_rank": Note("small models learn with all weights"),
    "actor.model.lora_path": Note("not read without is_lora"),
    "weight_syncer.*": Note("rollout and training share one set of weights: nothing is synchronised"),
    "rollout.enable_offload": Note("rollout and training share one set of weights: there is no second one to offload"),
    "rollout.enable_torch_compile": Note("engine.cuda_graphs decides about speed; results are the same"),
    "rollout.enable_cuda_graph": Note("engine.cuda_graphs decides about speed; results are the same"),
    "rollout.collect_*": Note("a rollout keeps what its update needs"),
    "rollout.sampling_params.repetition_penalty": Note(
        "none", (1.0, 1), "no penalty for repeated tokens here: action tokens are no prose"
    ),
    "rollout.sampling_params.do_sample": only_if(True, "rollouts always draw actions"),
    "rollout.sampling_params.max_new_tokens algorithm.length_params.*": Note("an action has as many tokens as it has"),
    "actor.model.proprio_dim": Note("the simulator's states have as many numbers as they have"),
    "actor.training_backend": only_if("fsdp", "there is one", "torch's own parallelism trains here"),
    "actor.fsdp_config.amp_autocast.enabled": only_if(False, "off", "engine.precision decides about autocasting"),
    "actor.fsdp_config.amp_autocast.precision": Note("engine.precision decides about autocasting"),
    "actor.fsdp_config.grad_scaler.enabled": only_if(False, "off", "gradients are not scaled here"),
    "actor.fsdp_config.mixed_precision.*": Note("engine.precision decides about number formats"),
    "actor.fsdp_config.*": Note(_FSDP),
    "actor.model.policy_setup": Note("env.control_mode and the simulator say it"),
    "actor.model.trust_remote_code": Note("no code of a checkpoint is run"),
    "actor.model.low_cpu_mem_usage": Note("always so"),
    "actor.model.attn_implementation": Note("torch chooses the kernel"),
    "actor.model.action_dim actor.model.obs_dim actor.model.openpi.action_env_dim": Note("the simulator says it"),
    "actor.model.value_type": only_if(
        "chunk_level",
        "the critic predicts values of chunks",
        "a critic, if there is one, predicts values of chunks here",
    ),
    "actor.model.add_value_head actor.model.*.add_value_head": Note("the advantage decides whether there is a critic"),
    "actor.model.image_size actor.model.vocab_size actor.model.hidden_size": Note("the checkpoint says it"),
    "actor.model.max_prompt_length": Note("prompts are as long as they are"),
    "actor.model.obs_converter_type": Note("the simulator names its cameras and states"),
    "actor.model.openpi.use_dsrl": only_if(
        False, "off", "this is PPO or GRPO here; DSRL is algorithm: dsrl (docs/off_policy.md)"
    ),
    "actor.model.openpi.dsrl_*": Note("only with use_dsrl; here: algorithm: dsrl (docs/off_policy.md)"),
    "reward.use_reward_model": only_if(
        False,
        "off",
        "there a learned reward takes the place of the simulator's; here the run learns from algorithm.reward as it is "
        "written (a learned one: algorithm.reward: classifier, see docs/algorithms.md)",
    ),
    "reward.use_output_step": only_if(False, "off", _REWARD_MODEL),
    "reward.*": never(_REWARD_MODEL),
    "router_server_args.*": never("part of the server of the learned reward"),
    "critic.use_critic_model": only_if(
        False, "off", "there is no separate critic model here: a critic is a part of the policy"
    ),
    "env.train.is_eval": only_if(False, "training draws start states at random"),
    "env.eval.is_eval": only_if(True, "evaluation plays start states in turn"),
    "env.train.video_cfg.save_video": only_if(False, "off", "videos show evaluations only (tracking.video)"),
    "env.*.video_cfg.*": Note("tracking.video decides about videos"),
    "env.*.data_collection.enabled": only_if(False, "off", _RECORDED),
    "env.*.data_collection.*": Note(_RECORDED),
    "env.train.use_ordered_reset_state_ids": only_if(
        False, _STARTS, "start states are drawn at random here; there each occurs once before any occurs again"
    ),
    "env.train.use_fixed_reset_state_ids": Note(_STARTS),
    "env.eval.use_ordered_reset_state_ids": Note("evaluation plays start states in turn"),
    "env.eval.use_fixed_reset_state_ids": Note("evaluation plays start states in turn"),
    "env.train.specific_reset_id": never("this simulator has no start state to choose"),
    "env.*.seed": Note("seed decides about everything random"),
    "env.*.wrap_obs_mode": Note("env.cameras and env.proprio say what is observed"),
    "env.*.init_params.num_envs": Note("env.num_envs decides this"),
    "env.*.init_params.max_episode_steps": Note("env.max_episode_steps decides this"),
    "env.*.init_params.sim_config.*": never("the task's own frequency is kept"),
    "env.*.init_params.sensor_configs.shader_pack": only_if(
        "default", "the simulator's own", "images are rendered with ManiSkill's default shaders"
    ),
    "env.*.init_params.human_render_camera_configs.*": Note("of videos only"),
    "env.*.init_params.render_mode": Note("the simulator's own"),
    "env.eval.auto_reset": Note("eval.episodes is the number of episodes"),
    "env.eval.ignore_terminations": Note(_SUCCESS),
    "env.eval.reward_coef": Note("returns are shown without the factor"),
    "env.eval.group_size": Note("an evaluation has no groups"),
    "env.eval.enable_offload": Note("env.offload decides this"),
}
"""Notes by patterns of keys, in one text; the first that fits counts. Keys that are converted need none."""

TWINS = {
    "env.eval.": ("env.train.", "evaluation has the simulator of training"),
    "rollout.model.": ("actor.model.", "the model that learns also acts"),
    "actor.model.openpi.num_steps": ("actor.model.num_steps", "model.denoising_steps decides this"),
    "actor.model.openpi.action_chunk": ("actor.model.num_action_chunks", "rollout.chunk_size decides this"),
}
"""Keys, or beginnings of keys, that here always have the value of another one, and what is said of it."""
