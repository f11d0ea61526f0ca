"""Defines the config of a run. Each service reads its own section; the coordinator reads all of it."""

from pydantic import Field

from services.common.config.advantage import AdvantageConfig, SelectionConfig
from services.common.config.agent_rules import check_agent, check_collected
from services.common.config.base import AnyRun
from services.common.config.data import DataConfig
from services.common.config.environment import REWARDLESS, EnvironmentConfig
from services.common.config.evaluation import EvaluationConfig, check_held_out, no_set
from services.common.config.layout import check_layout, check_minibatches, layout_of, named_ranks, samples_at_once
from services.common.config.loss import check_top_k
from services.common.config.operation import (
    BUCKET_BYTES,
    CheckpointConfig,
    ObservabilityConfig,
    Placement,
    RestartConfig,
    TimeoutsConfig,
    WeightsConfig,
    check_placement,
    check_precision,
)
from services.common.config.reward import RewardConfig
from services.common.config.rollout import RolloutConfig, SpeculationConfig
from services.common.config.trainer import (
    CriticConfig,
    ReferenceConfig,
    RoleConfig,
    TeacherConfig,
    TrainerConfig,
    require_used,
)


class Config(AnyRun):
    """The config of a reinforcement-learning run."""

    seed: int = Field(default=0, ge=0, lt=2**31)
    """Random seed for data order, sampling and initialization."""
    num_steps: int = Field(default=100, ge=1)
    """Number of training steps. Each step trains on one batch and raises the policy version by 1."""
    placement: Placement = "disaggregated"
    """Which GPUs trainer and engines use. disaggregated: each has its own; colocated: every trainer rank shares its GPU
    with one engine worker, and only one of them keeps its memory there at a time, unless
    rollout.engine.enable_sleep_mode is false. Needs as many engine workers as trainer ranks, all on one host."""
    data: DataConfig
    """Prompts."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation."""
    selection: SelectionConfig = SelectionConfig()
    """Choice of the prompts to try and the groups to train on."""
    reward: RewardConfig = RewardConfig()
    """Scoring."""
    environment: EnvironmentConfig | None = None
    """Environment that answers the policy in episodes of several turns; unset if a sample is one completion."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Advantages."""
    trainer: TrainerConfig = TrainerConfig()
    """Training of the policy."""
    reference: ReferenceConfig = ReferenceConfig()
    """Reference model of the KL penalties; loaded only if a KL penalty is set."""
    critic: CriticConfig | None = None
    """Value model; required by advantage.kind gae, unset for all other kinds. `critic: {}` uses its defaults."""
    teacher: TeacherConfig | None = None
    """Model that the policy is distilled from; required by advantage.kind distill, by advantage.distill_coef and by
    trainer.loss.distill, unset otherwise."""
    weights: WeightsConfig = WeightsConfig()
    """Publication of weights."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints and export."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation on held-out prompts."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    """Deadlines of calls."""
    restart: RestartConfig = RestartConfig()
    """Restarts of services that this command started."""
    observability: ObservabilityConfig = ObservabilityConfig()
    """Metrics, traces, trackers and logs."""

    @property
    def needs_reference(self) -> bool:
        return self.trainer.loss.kl_coef > 0 or self.advantage.needs_reference

    @property
    def is_reference_the_base(self) -> bool:
        """Whether the reference is the frozen base under the policy's adapters: `reference` is unset."""
        return self.trainer.lora.rank > 0 and self.reference == ReferenceConfig()

    @property
    def role_sections(self) -> dict[str, RoleConfig]:
        """The sections of the models beside the policy, keyed by name; the reference has one even if it is unused."""
        sections = {"reference": self.reference, "critic": self.critic, "teacher": self.teacher}
        return {name: section for name, section in sections.items() if section}

    @property
    def auxiliary_roles(self) -> tuple[str, ...]:
        """The sections of the other models that process each batch; the reference may be the policy's base."""
        return tuple(name for name in self.role_sections if name != "reference" or self.needs_reference)

    @property
    def models(self) -> dict[str, TrainerConfig]:
        """The settings for the ranks of each model, keyed by the model's section in this config."""
        sections, is_base = self.role_sections, self.is_reference_the_base
        names = [name for name in self.auxiliary_roles if name != "reference" or not is_base]
        models = {"trainer": self.trainer, **{name: sections[name].settings(self.trainer) for name in names}}
        return {name: model.for_steps(self.num_steps) for name, model in models.items()}

    @property
    def max_response_tokens(self) -> int:
        """The maximum number of tokens of a sample after its first prompt."""
        if self.environment is None:
            return self.rollout.sampling.max_tokens
        # An agent's rows are limited by the model's length only: its max_tokens are those of a whole episode.
        of_episode = None if self.environment.kind == "agent" else self.environment.max_tokens
        return of_episode or self.rollout.max_model_len - self.data.max_prompt_tokens

    @property
    def takes_turns(self) -> bool:
        """Whether trainer and engines share GPUs, and hold them one after the other."""
        return self.placement == "colocated" and self.rollout.can_sleep

    @property
    def is_side_by_side(self) -> bool:
        """Whether trainer and engines share GPUs, and each keeps its memory."""
        return self.placement == "colocated" and not self.rollout.can_sleep

    @property
    def bucket_bytes(self) -> int:
        return self.weights.bucket_bytes or BUCKET_BYTES[self.placement]

    @property
    def _components(self) -> list[str]:
        """The names of what a sample's reward is the sum of."""
        gives_rewards = self.environment is not None and self.environment.kind not in REWARDLESS
        return [scorer.component for scorer in self.reward.scorers] + ["environment"] * gives_rewards

    @property
    def _longest(self) -> tuple[int, str]:
        """The maximum number of tokens of a sample with its prompt, and the config keys that add up to it."""
        key = "environment.max_tokens" if self.environment else "rollout.sampling.max_tokens"
        return self.data.max_prompt_tokens + self.max_response_tokens, f"data.max_prompt_tokens + {key}"

    @property
    def wants_routed_experts(self) -> bool:
        """Whether the engines are asked for the experts that they choose."""
        # vLLM returns none for a sample that ends at a stop string; those of drafted tokens were not compared with the
        # trainer's.
        return self.trainer.uses_router_replay and not (self.rollout.sampling.stop or self.rollout.speculation)

    def check_rules(self) -> None:
        self._check_room()
        self._check_models()  # before the rules of a batch, which count data-parallel ranks
        self._check_batch()
        self._check_sampling()
        self._check_rewards()
        self._check_selection()
        self._check_agent()
        self._check_sets()
        column = self.data.metrics_column
        metrics = {name: self.evaluation.metrics(name, self._components, column) for name in self.data.eval}
        check_held_out(self.evaluation, metrics, self.checkpoint.keep_best, self.checkpoint.save_freq)

    def _check_models(self) -> None:
        policys = self.trainer.strategy
        roles = self.role_sections
        inherited = {role.strategy for role in roles.values() if role.strategy and not getattr(role, role.strategy)}
        if inherited <= {policys}:  # otherwise another model inherits the section that the policy does not use
            require_used(self.trainer, policys, key="trainer")
        for name, role in roles.items():
            require_used(role, role.strategy or policys, key=name)
        for name, model in self.models.items():
            if model.strategy == "megatron":
                tokens = model.max_tokens_per_microbatch
                is_own = name != "trainer" and getattr(self, name).deployment == "own"
                key, section = f"{name}.megatron", name if is_own else "trainer"
                check_layout(model.megatron, model.num_ranks, max_tokens=tokens, key=key, section=section)
        if self.placement == "colocated":
            names = [name for name in self.models if name != "trainer"]
            check_placement(self.trainer, self.rollout, {name: getattr(self, name).deployment for name in names})
        self._check_others()

    def _check_others(self) -> None:
        """Refuses a critic or a teacher that is of no use, and the lack of one that is needed."""
        if self.advantage.needs_values != (self.critic is not None):
            raise ValueError(
                f"advantage.kind {self.advantage.kind} {'needs' if self.advantage.needs_values else 'does not use'} a "
                "critic: set both advantage.kind gae and critic (critic: {} for its defaults), or neither"
            )
        self._check_teacher()
        critic = self.models.get("critic")
        if critic and critic.strategy == "megatron" and critic.megatron.use_mbridge:
            raise ValueError(
                "critic.megatron.use_mbridge: mbridge builds no value models; set critic.megatron without it"
            )
        if self.critic and self.trainer.lag.versions:
            raise ValueError(
                "trainer.lag.versions is above 0: a critic's values would come from weights that change meanwhile; set "
                "trainer.lag.versions to 0, or another advantage.kind without critic"
            )

    def _check_teacher(self) -> None:
        """Refuses a teacher that is of no use, the lack of one that is needed, and what two keys would do twice."""
        loss = self.trainer.loss
        in_loss, in_advantage = loss.distill.coef > 0, self.advantage.needs_teacher
        if self.advantage.distill_coef == 0 and not in_loss:
            raise ValueError(
                "advantage.distill_coef 0 distills nothing: leave it out, or set trainer.loss.distill.coef above 0"
            )
        if (in_loss or in_advantage) != (self.teacher is not None):
            raise ValueError(
                "advantage.kind distill, advantage.distill_coef and trainer.loss.distill.coef need a teacher, and "
                "nothing else uses one: set teacher.model, or leave all of them out"
            )
        if self.teacher and not loss.is_sampled:
            raise ValueError(
                f"trainer.loss.kind {loss.kind} reads no advantages, so nothing would be distilled from the teacher: "
                "set another kind, such as reinforce"
            )
        if in_loss and self.advantage.kind == "distill" and self.advantage.distill_coef is None:
            raise ValueError(
                "trainer.loss.distill.coef and advantage.kind distill would both descend the divergence from the "
                "teacher: set advantage.distill_coef to 0 for that of the loss alone, or to 1 for both"
            )
        if in_loss:
            key = "rollout.max_model_len" if self.environment else "rollout.sampling.max_tokens"
            check_top_k(loss.distill.top_k, self.max_response_tokens, key)

    def _check_room(self) -> None:
        # An agent's max_prompt_tokens limit only the rows, and not its calls.
        takes_turns = self.environment and self.environment.kind != "agent"
        if takes_turns and self.max_response_tokens < 1:  # samples of an environment may fill what the prompt leaves
            raise ValueError(
                f"data.max_prompt_tokens {self.data.max_prompt_tokens} leaves no room for a turn below "
                f"rollout.max_model_len = {self.rollout.max_model_len}; lower data.max_prompt_tokens or "
                "raise rollout.max_model_len"
            )

    def _check_batch(self) -> None:
        groups, group = self.data.prompts_per_step, self.rollout.completions_per_prompt
        for name, model in self.models.items():
            check_minibatches(name, model, "data.prompts_per_step", groups, group)
        longest, parts = self._longest
        limits = {"rollout.max_model_len": self.rollout.max_model_len}
        limits |= {f"{name}.max_tokens_per_microbatch": m.max_tokens_per_microbatch for name, m in self.models.items()}
        for key, limit in limits.items():
            if longest > limit:
                raise ValueError(f"{parts} = {longest} is above {key} = {limit}; raise {key} to at least {longest}")
        for name, model in self.models.items():
            padded, budget = longest + -longest % layout_of(model).align, model.max_tokens_per_microbatch
            is_agents = self.environment is not None and self.environment.kind == "agent" and samples_at_once(model) > 1
            if (group % samples_at_once(model) or is_agents) and budget < 2 * padded:
                of_group = "the number of an agent's rows" if is_agents else f"rollout.completions_per_prompt {group}"
                raise ValueError(
                    f"{of_group} is not divisible by {named_ranks(name, model)}, so "
                    f"long samples may be split unevenly: raise {name}.max_tokens_per_microbatch "
                    f"{budget} to at least {2 * padded}"
                )

    def _check_sampling(self) -> None:
        if self.trainer.moe.router_replay == "on" and self.rollout.sampling.stop:
            raise ValueError(
                "trainer.moe.router_replay on: vLLM returns no routed experts of a sample that ends at a stop string; "
                "leave rollout.sampling.stop out, or set trainer.moe.router_replay to auto"
            )
        check_precision(self.trainer, self.rollout)
        if self.rollout.speculation:
            self._check_speculation(self.rollout.speculation)
        sampling = self.rollout.sampling
        if self.environment and (set_keys := [k for k in ("ignore_eos", "stop_token_ids") if getattr(sampling, k)]):
            raise ValueError(
                f"rollout.sampling.{set_keys[0]} with an environment: the next turn is appended after the model's own "
                "stop tokens, as its chat template does; leave it out, or use rollout.sampling.stop"
            )
        if not sampling.temperature > 0:
            raise ValueError("rollout.sampling.temperature must be above 0: greedy samples of a prompt are identical")

    def _check_agent(self) -> None:
        if not self.environment or self.environment.kind != "agent":
            if any(scorer.kind == "code" and scorer.file for scorer in self.reward.scorers):
                raise ValueError(
                    "reward.scorers: a code scorer has a file, which an agent leaves: set environment.kind"
                )
            return
        check_agent(self.environment, self.data, self.trainer.loss)
        check_collected(self.environment, self.reward)

    def _check_speculation(self, speculation: SpeculationConfig) -> None:
        if self.trainer.moe.router_replay == "on":
            raise ValueError(
                "trainer.moe.router_replay on: the routed experts of drafted tokens were not compared with the "
                "trainer's; leave rollout.speculation out, or set trainer.moe.router_replay to auto"
            )
        if self.trainer.lora.published_rank:
            raise ValueError(
                "trainer.lora.publish adapter: drafted tokens were not verified with adapters in the engine; leave "
                "rollout.speculation out, or set trainer.lora.publish to merged"
            )
        if speculation.kind == "eagle3" and self.takes_turns:
            raise ValueError(
                "rollout.speculation.kind eagle3: an engine that sleeps drops the weights of the head, which nobody "
                "publishes again; set kind ngram or suffix, or placement disaggregated"
            )
        for name, settings in self.evaluation.sets.items():
            reasons = {key: f"vLLM has no {key} with speculative decoding" for key in ("min_p", "min_tokens")}
            reasons["bad_words"] = "it was not checked that no drafted token completes one"
            for key, why in reasons.items():
                if getattr(settings, key):
                    instead = "set top_p instead" if key == "min_p" else "leave it out"
                    path = f"evaluation.sets.{name}.{key}"
                    raise ValueError(f"{path}: {why}; {instead}, or leave rollout.speculation out")
        # vLLM 0.32 adds the tokens that are being verified and those that it would draft next. If that exceeds the
        # limit for one sample, it drafts token 0 for each sample of the step, which costs time and gains nothing.
        (longest, parts), limit = self._longest, self.rollout.max_model_len
        if (least := longest + 2 * speculation.num_tokens) > limit:
            raise ValueError(
                f"{parts} = {longest} leaves no room for twice rollout.speculation.num_tokens {speculation.num_tokens} "
                f"below rollout.max_model_len = {limit}; raise that to at least {least}"
            )

    def _check_rewards(self) -> None:
        if not self.reward.scorers and self.advantage.kind != "distill":
            if not self.environment:
                raise ValueError("reward.scorers: set at least one scorer, or an environment")
            if self.environment.kind in REWARDLESS:
                raise ValueError(f"reward.scorers: set at least one; kind {self.environment.kind} gives no rewards")
        if self.environment and any(scorer.component == "environment" for scorer in self.reward.scorers):
            raise ValueError("reward.scorers: the name `environment` is taken by the environment's rewards")
        limit_s, deadline_s = self.reward.group_timeout_s, self.timeouts.score_s
        kinds = {scorer.kind for scorer in self.reward.scorers} & {"math", "code"}
        if kinds and limit_s >= deadline_s:
            raise ValueError(
                f"reward.group_timeout_s {limit_s:g} must be below timeouts.score_s {deadline_s:g}: a group would "
                "reach the deadline of its call before its samples reach their limits"
            )

    def _check_selection(self) -> None:
        compares = [f"advantage.kind {self.advantage.kind}"] if self.advantage.needs_group else []
        compares += ["selection.dynamic"] if self.selection.dynamic.enabled else []
        if compares and self.rollout.completions_per_prompt < 2:
            raise ValueError(
                f"{compares[0]} compares the samples of a prompt with each other: rollout.completions_per_prompt must "
                "be at least 2"
            )
        if self.advantage.whitening == "group" and self.rollout.completions_per_prompt < 2:
            raise ValueError(
                "advantage.whiten group makes the advantages of a prompt's only sample 0: set whiten to batch or none, "
                "or rollout.completions_per_prompt to at least 2"
            )
        named = {f"advantage.components.{name}": name for name in self.advantage.components}
        for key in ("dynamic", "curriculum"):
            settings = getattr(self.selection, key)
            if settings.enabled and not self._components:
                raise ValueError(f"selection.{key} compares rewards: set at least one of reward.scorers")
            if settings.component is not None:
                named[f"selection.{key}.component {settings.component}"] = settings.component
        for what, component in named.items():
            if component not in self._components:
                raise ValueError(f"{what} is not one of reward.scorers: {', '.join(self._components)}")
        if self.advantage.kind == "gdpo":
            self._check_components()

    def _check_components(self) -> None:
        """Refuses what leaves samples without a component in the batch, or compares sums where gdpo compares parts."""
        for scorer in self.reward.scorers:
            if scorer.component in self.advantage.components and not scorer.weight:
                raise ValueError(
                    f"advantage.components.{scorer.component}: a sample that a scorer of weight 0 fails to score is "
                    "still trained on: set its weight in reward.scorers to another number"
                )
        if self.reward.on_failure == "zero":
            raise ValueError(
                "reward.on_failure zero trains on samples without a score, and advantage.kind gdpo reads each "
                "component: set drop_group or fail"
            )
        if self.selection.dynamic.enabled and self.selection.dynamic.component is None:
            raise ValueError(
                "selection.dynamic drops groups whose rewards are equal, and their components may differ, which "
                "advantage.kind gdpo compares: set selection.dynamic.component"
            )

    def _check_sets(self) -> None:
        for name in self.evaluation.sets:
            if name not in self.data.eval:
                raise ValueError(f"evaluation.sets.{name}: {no_set(name, self.data.eval)}")
        for name in self.data.eval:
            settings = self.evaluation.settings(name)
            if settings.min_tokens > (most := settings.max_tokens or self.rollout.sampling.max_tokens):
                least = settings.min_tokens
                raise ValueError(f"evaluation.sets.{name}: min_tokens {least} must be at most max_tokens {most}")
            longest = self.data.max_prompt_tokens + (settings.max_tokens or 0)
            if longest > (limit := self.rollout.max_model_len):
                raise ValueError(
                    f"evaluation: data.max_prompt_tokens + max_tokens of set {name} = {longest} is above "
                    f"rollout.max_model_len = {limit}; raise that to at least {longest}"
                )
