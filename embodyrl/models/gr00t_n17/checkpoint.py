"""Files of a GR00T N1.7 or N1.6 checkpoint beside the weights, in NVIDIA's layout and in LeRobot's. Also builds these
files for models with random weights, and for the published size.

Imports no torch, so that a config can be checked against its checkpoint before anything starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from embodyrl.envs import SimulatorSpec
from embodyrl.models.errors import PolicyError
from embodyrl.models.flow.config import told_texts
from embodyrl.models.gr00t.config import LEROBOT_PREFIX, LEROBOT_TYPE, embodiment_number, refuse_weights
from embodyrl.models.gr00t.prompts import new_tokenizer as new_chat_tokenizer
from embodyrl.models.gr00t_n17 import lerobot
from embodyrl.models.gr00t_n17.config import (
    DIT,
    N16,
    VERSIONS,
    VLM,
    VLM_CONFIG,
    Architecture,
    Gr00tN17Config,
    Version,
    check_model,
    published_config,
)
from embodyrl.models.gr00t_n17.geometry import FEWEST, MOST, PREPROCESSOR, Geometry
from embodyrl.models.gr00t_n17.prompts import PlacedPrompts, new_tokenizer
from embodyrl.models.gr00t_n17.robots import Robot
from embodyrl.models.lerobot import ACTION, STATE
from embodyrl.models.saved import WeightLayout, parse_json, read_json, refuse_other_weights, weight_layout
from embodyrl.models.vla.folder import CONFIG, CheckpointFolder, as_json, no_config, wrong
from embodyrl.models.vla.prompts import TOKENIZER

PROCESSOR, STATISTICS, EMBODIMENTS = "processor_config.json", "statistics.json", "embodiment_id.json"
PLACES = ("", "processor/")
"""Where these files are, within a checkpoint's folder."""
KEPT = (".json", ".jinja", ".txt", "_processor.safetensors")
"""Endings of the names of files that a saved policy has copies of."""
NOT_KEPT = ("policy.json", "base.json", "model.safetensors.index.json")
"""Of these, files that are written anew."""
USUAL_EMBODIMENTS = {
    "simpler_env_google": 0,
    "simpler_env_widowx": 1,
    "libero_sim": 2,
    "new_embodiment": 10,
    "oxe_droid_relative_eef_relative_joint": 24,
    "real_g1_relative_eef_relative_joints": 25,
    "unitree_g1_full_body_with_waist_height_nav_cmd": 25,
    "real_r1_pro_sharpa_relative_eef": 26,
    "real_r1_pro_sharpa_relative_eef_human": 26,
    "real_r1_pro_sharpa_relative_eef_maxinsights": 26,
    "real_r1_pro_sharpa_relative_eef_mecka": 26,
    "xdof_relative_eef_relative_joint": 27,
    "xdof_relative_eef_relative_joint_subtask": 27,
}
"""Index of each robot's networks, where a checkpoint does not say."""
NEW_ROBOT = "new_embodiment"
"""Robot of the statistics of a LeRobotDataset, which names none."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles(CheckpointFolder):
    """All files of a checkpoint except the weights."""

    version: Version
    layout: WeightLayout | None
    """Of the weights; None: there are none yet."""
    tag: str | None
    """The robot that is asked for; None: the only one."""

    # ---------------------------------------------------------------------------------------------------- reading

    @classmethod
    def read(cls, config: Gr00tN17Config) -> CheckpointFiles:
        """See `CheckpointFolder.read`; with the files of the vision-language model in `config.vlm`, and the statistics
        in `config.statistics`, if they are given."""
        folder, version = Path(str(config.checkpoint)), VERSIONS[config.name]
        refuse_other_weights(folder)
        if not (folder / CONFIG).is_file():
            raise no_config(folder, f"a {version.name} checkpoint")
        found = _contents(folder, "", PLACES[1], f"{VLM}/")
        if config.vlm is not None:
            found = {name: content for name, content in found.items() if not name.startswith(f"{VLM}/")}
            found |= _read_vlm(Path(config.vlm), version)
        _check_vlm(found, version, str(config.vlm or folder / VLM))
        files = cls(companions=found, version=version, layout=weight_layout(folder), tag=config.embodiment_tag)
        if not files.of_lerobot:  # whose config.json is the same for all versions
            check_model(files.written, version)
        return files._checked().with_numbers(config)

    def _checked(self) -> CheckpointFiles:
        """Return itself; raises a `PolicyError` if the weights are those of another version."""
        assert self.layout is not None
        refuse_weights(self.layout.all_shapes, self.version.model_type, self.prefix)
        self._check_words()
        return self

    def _check_words(self) -> None:
        """Raise a `PolicyError` if the vision-language model has another vocabulary than the weights."""
        content = self.companions.get(VLM_CONFIG)
        if content is None or self.layout is None:
            return
        ends = ("embed_tokens.weight", "lm_head.weight")
        words = {shape[0] for name, shape in self.layout.all_shapes.items() if name.endswith(ends)}
        stated = self.architecture.vlm.text["vocab_size"]
        if words and stated not in words:
            raise PolicyError(
                f"{VLM_CONFIG} states a vocabulary of {stated} tokens (vocab_size), the weights have {max(words)}",
                self.version.remedy,
            )

    @property
    def prefix(self) -> str:
        """Beginning of the names of all weights."""
        names = {} if self.layout is None else self.layout.all_shapes
        return LEROBOT_PREFIX if names and all(name.startswith(LEROBOT_PREFIX) for name in names) else ""

    @cached_property
    def written(self) -> Mapping[str, Any]:
        """What is in config.json."""
        return parse_json(self.companions[CONFIG], CONFIG)

    @property
    def of_lerobot(self) -> bool:
        """Whether LeRobot wrote the folder."""
        return self.written.get("type") == LEROBOT_TYPE

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """NVIDIA's config.json. LeRobot's has no sizes: those are the published ones, or follow from the weights."""
        if not self.of_lerobot:
            return self.written
        shapes = {} if self.layout is None else self.layout.all_shapes
        own = {name.removeprefix(self.prefix): shape for name, shape in shapes.items()}
        return lerobot.stated_config(published_config(self.version), self.written, own)

    @cached_property
    def architecture(self) -> Architecture:
        """Shapes and connections of the network.

        Raises:
            PolicyError: a file is missing or damaged, or asks for what is not implemented.
        """
        content = self.companions.get(VLM_CONFIG)
        if content is None:
            published = f"{self.version.home} (the checkpoint has no {VLM_CONFIG})"
            return Architecture.from_config(self.config, self.version.published, self.version, published)
        return Architecture.from_config(self.config, parse_json(content, VLM_CONFIG), self.version)

    # --------------------------------------------------------------------------------------------------- processing

    def _find(self, name: str) -> str | None:
        """Return the path of one of the processor's files; None if there is none."""
        return next((place + name for place in PLACES if place + name in self.companions), None)

    @cached_property
    def processing(self) -> lerobot.Processing:
        """What the processor's files say.

        Raises:
            PolicyError: one is missing or damaged.
        """
        if self.of_lerobot and self._find(PROCESSOR) is None:
            return lerobot.read_steps(self.companions)
        paths = [self._find(name) for name in (PROCESSOR, STATISTICS)]
        if paths[0] is None or paths[1] is None:
            lacking = " and no ".join(
                name for name, path in zip((PROCESSOR, STATISTICS), paths, strict=True) if not path
            )
            raise PolicyError(
                f"the checkpoint has no {lacking}, neither in its folder nor in {PLACES[1]}",
                "download it, too: it says how images, states and actions are processed",
            )
        content = parse_json(self.companions[paths[0]], paths[0])
        settings = content.get("processor_kwargs")
        if not isinstance(settings, Mapping):
            raise wrong(f"{paths[0]}: processor_kwargs", settings, "a JSON object")
        path = self._find(EMBODIMENTS)
        return lerobot.Processing(
            settings={**self._settings_of_config(), **{k: v for k, v in settings.items() if v is not None}},
            statistics=parse_json(self.companions[paths[1]], paths[1]),
            embodiments=None if path is None else parse_json(self.companions[path], path),
            file=paths[0],
            statistics_file=paths[1],
            embodiments_file=path or EMBODIMENTS,
        )

    def _settings_of_config(self) -> dict[str, Any]:
        """Return settings of images in config.json, for a processor that does not say."""
        names = ("image_target_size", "image_crop_size", "shortest_image_edge", "crop_fraction")
        return {name: self.written[name] for name in names if self.written.get(name) is not None}

    @cached_property
    def geometry(self) -> Geometry:
        """How images are processed; raises a `PolicyError` if a file is damaged."""
        content = self.companions.get(PREPROCESSOR)
        limits = (1, 2**31) if self.version is N16 else (FEWEST, MOST)
        found = Geometry.read(
            self.processing.settings,
            self.processing.file,
            self.architecture.vlm,
            {} if content is None else parse_json(content, PREPROCESSOR),
            limits,
        )
        if self.of_lerobot:
            lerobot.refuse_several_sizes(self.written, found)
        return found

    @cached_property
    def robot(self) -> Robot:
        """The robot that is asked for; raises a `PolicyError` if there is none, or its entries are damaged."""
        return self.processing.source.robot(self.tag)

    def embodiment(self, number: int | None) -> int:
        """Return the index of the robot's networks.

        Args:
            number: of the config; None: that of the robot's name.

        Raises:
            PolicyError: there is none, or it is out of range.
        """
        found = self.processing.embodiments
        known = USUAL_EMBODIMENTS if found is None else found
        for tag, index in known.items():
            if isinstance(index, bool) or not isinstance(index, int):
                raise wrong(f"{self.processing.embodiments_file}: {tag}", index, "a whole number")
        stated = known.get(self.robot.tag) if number is None else number
        return embodiment_number(self.robot.tag, stated, self.architecture.head.embodiments, known)

    def prompts(self, size: tuple[int, int], images: int, tasks: Sequence[str], length: int | None) -> PlacedPrompts:
        """Return the prompts about images of a size (height, width).

        Args:
            size: of the images [pixels].
            images: their number, of all times.
            tasks: expected task descriptions.
            length: tokens of every prompt; None: those of the longest.

        Raises:
            PolicyError: there is no tokenizer, it is that of another model, or a prompt is too long.
        """
        start = f"{VLM}/"
        names = (TOKENIZER, "vocab.json", "merges.txt", "added_tokens.json")
        tokenizer = {name: self.companions[start + name] for name in names if start + name in self.companions}
        if TOKENIZER not in tokenizer and not {"vocab.json", "merges.txt"} <= tokenizer.keys():
            raise PolicyError(
                f"the checkpoint has no {start}{TOKENIZER}", f"{self.version.remedy} (its weights are not needed)"
            )
        formalize = self.processing.settings.get("formalize_language", True)
        if not isinstance(formalize, bool):
            raise wrong(f"{self.processing.file}: formalize_language", formalize, "true or false")
        return PlacedPrompts(
            tokenizer,
            chats=self.version is N16,
            image_token=self.architecture.vlm.image_token,
            images=images,
            grid=self.geometry.tokens(*size),
            formalize=formalize,
            tasks=tasks,
            length=length,
        )

    # --------------------------------------------------------------------------------------------------- statistics

    def with_statistics(self, path: str) -> CheckpointFiles:
        """Return the files as they are: `read` and `scratch` have read these statistics."""
        return self

    def with_numbers(self, config: Gr00tN17Config) -> CheckpointFiles:
        """Return a copy with the statistics in `config.statistics`, if it is given.

        Raises:
            PolicyError: the file does not exist, or is damaged.
        """
        if config.statistics is None:
            return self
        path = Path(config.statistics)
        if not path.is_file():
            raise PolicyError(f"model.statistics = {config.statistics!r} is no file", "name stats.json of a data set")
        content = read_json(path)
        if ACTION not in content:
            return self._with_robots(content)
        state = {} if STATE not in content else {"state": content[STATE]}
        numbers = {"state": state, "action": {"action": content[ACTION]}}
        tag = self.tag or NEW_ROBOT
        horizon = self.architecture.action_horizon
        modalities = {
            "video": {},
            "state": {"delta_indices": [0], "modality_keys": [*state]},
            "action": {"delta_indices": [*range(horizon)], "modality_keys": ["action"], "action_configs": None},
        }
        return replace(self._with_robot(tag, numbers, modalities), tag=tag)

    def _with_robots(self, statistics: Mapping[str, Any]) -> CheckpointFiles:
        """Return a copy with the statistics of a statistics.json."""
        tag = self.processing.source.choose(self.tag)
        if tag not in statistics:
            known = ", ".join(statistics) or "none"
            raise PolicyError(f"model.statistics has no robot {tag!r} (known: {known})", "name another file")
        return self._with_robot(tag, statistics[tag], self.processing.source.modalities[tag])

    def _with_robot(self, tag: str, numbers: Any, modalities: Mapping[str, Any]) -> CheckpointFiles:
        """Return a copy in which a robot has these numbers and groups."""
        found = self.processing
        path = self._find(PROCESSOR)
        if path is None:
            changed = lerobot.with_robot(self.companions, tag, numbers, modalities)
        else:
            content = parse_json(self.companions[path], path)
            kwargs = content["processor_kwargs"]
            robots = {**kwargs.get("modality_configs", {}), tag: modalities}
            changed = {
                path: as_json({**content, "processor_kwargs": {**kwargs, "modality_configs": robots}}),
                found.statistics_file: as_json({**found.statistics, tag: numbers}),
            }
        return replace(self, companions={**self.companions, **changed})

    def with_cameras(self, cameras: Sequence[str]) -> CheckpointFiles:
        """Return a copy with the names of the images of a robot whose statistics do not name them."""
        source, tag = self.processing.source, self.robot.tag
        modalities = {**source.modalities[tag], "video": {"delta_indices": [0], "modality_keys": [*cameras]}}
        return self._with_robot(tag, source.statistics[tag], modalities)

    # --------------------------------------------------------------------------------------------------- new models

    @classmethod
    def scratch(cls, config: Gr00tN17Config, simulator: SimulatorSpec, chunk_size: int) -> CheckpointFiles:
        """See `CheckpointFolder.scratch`."""
        version = VERSIONS[config.name]
        texts = told_texts(simulator.tasks.values(), config.indicator)
        tokenizer = (new_chat_tokenizer if version is N16 else new_tokenizer)(texts)
        content, vlm = _scratch_configs(config, version, simulator, chunk_size)
        key = "image_token_index" if version is N16 else "image_token_id"
        piece = "<IMG_CONTEXT>" if version is N16 else "<|image_pad|>"
        vlm |= {key: tokenizer.token_to_id(piece)}
        vlm["text_config"] |= {"vocab_size": tokenizer.get_vocab_size()}
        side = config.scratch.image_size
        unit = 2 * config.scratch.patch_size
        settings = {"image_target_size": [side, side], "shortest_image_edge": side, "crop_fraction": None}
        tag = config.embodiment_tag or ROBOT
        numbers, modalities = _of_simulator(simulator, content["action_horizon"])
        files = cls._new(
            version,
            content,
            vlm,
            {"size": {"shortest_edge": unit**2, "longest_edge": MOST}},
            tokenizer.to_str().encode(),
            settings,
            {tag: (numbers, modalities, 0)},
        )
        return replace(files, tag=tag).with_numbers(replace(config, embodiment_tag=tag))

    @classmethod
    def published(cls, config: Gr00tN17Config) -> CheckpointFiles:
        """See `CheckpointFolder.published`; for LIBERO's robot, or another one of the same size."""
        version = VERSIONS[config.name]
        token = version.published["image_token_index" if version is N16 else "image_token_id"]
        tokenizer = (new_chat_tokenizer if version is N16 else new_tokenizer)([], token)
        tag = config.embodiment_tag or "libero_sim"
        ends = {"min": -1.0, "max": 1.0, "mean": 0.0, "std": 1.0, "q01": -1.0, "q99": 1.0}
        numbers = {
            part: {part: {name: [end] * size for name, end in ends.items()}}
            for part, size in (("state", STATE_DIM), ("action", ACTION_DIM))
        }
        horizon = int(version.config["action_horizon"])
        modalities = {**_modalities([], horizon), "video": {}}  # as many images as there are cameras
        settings = {
            "image_target_size": [256, 256],
            "shortest_image_edge": 256,
            "crop_fraction": 0.95,
            "use_percentiles": True,
        }
        content = published_config(version)
        robots = {tag: (numbers, modalities, USUAL_EMBODIMENTS.get(tag, USUAL_EMBODIMENTS[NEW_ROBOT]))}
        pixels = {} if version is N16 else {"size": {"shortest_edge": FEWEST, "longest_edge": MOST}}
        files = cls._new(version, content, version.published, pixels, tokenizer.to_str().encode(), settings, robots)
        return replace(files, tag=tag)

    @classmethod
    def _new(
        cls,
        version: Version,
        config: Mapping[str, Any],
        vlm: Mapping[str, Any],
        preprocessor: Mapping[str, Any],
        tokenizer: bytes,
        settings: Mapping[str, Any],
        robots: Mapping[str, tuple[Any, Any, int]],
    ) -> CheckpointFiles:
        kwargs = {
            "modality_configs": {tag: modalities for tag, (_, modalities, _) in robots.items()},
            "use_albumentations": True,
            "letter_box_transform": False,
            "image_crop_size": None,
            "formalize_language": True,
            "use_percentiles": False,
            "use_relative_action": False,
            "clip_outliers": True,
            "apply_sincos_state_encoding": False,
            **settings,
        }
        processor = {"processor_class": f"{version.model_type}Processor", "processor_kwargs": kwargs}
        companions = {
            CONFIG: as_json(config),
            PROCESSOR: as_json(processor),
            STATISTICS: as_json({tag: numbers for tag, (numbers, _, _) in robots.items()}),
            EMBODIMENTS: as_json({tag: number for tag, (_, _, number) in robots.items()}),
            VLM_CONFIG: as_json(vlm),
            f"{VLM}/{TOKENIZER}": tokenizer,
        }
        if preprocessor:
            companions[PREPROCESSOR] = as_json(preprocessor)
        return cls(companions=companions, version=version, layout=None, tag=None)


def _contents(folder: Path, *places: str) -> dict[str, bytes]:
    """Return the files of a checkpoint except the weights, by path within its folder."""
    return {
        place + path.name: path.read_bytes()
        for place in places
        for path in sorted((folder / place).glob("*"))
        if path.name.endswith(KEPT) and path.name not in NOT_KEPT and path.is_file()
    }


def _read_vlm(folder: Path, version: Version) -> dict[str, bytes]:
    """Return the files of a vision-language model."""
    found = {f"{VLM}/{name}": content for name, content in _contents(folder, "").items()} if folder.is_dir() else {}
    if not found:
        raise PolicyError(f"model.vlm = {str(folder)!r} holds no files of a vision-language model", version.remedy)
    return found


def _check_vlm(found: Mapping[str, bytes], version: Version, place: str) -> None:
    """Raise a `PolicyError` if a folder lacks some of the vision-language model's files, but not all."""
    needed = (VLM_CONFIG,) if version is N16 else (VLM_CONFIG, PREPROCESSOR)
    lacking = [name.removeprefix(f"{VLM}/") for name in needed if name not in found]
    if lacking and any(name.startswith(f"{VLM}/") for name in found):
        raise PolicyError(f"{place} has no {' and no '.join(lacking)}", version.remedy)


# ------------------------------------------------------------------------------------------------- without a checkpoint

ROBOT = "simulator"
"""Robot of a model with random weights."""
STATE_DIM, ACTION_DIM = 8, 7
"""Sizes of public checkpoints for LIBERO."""


def _modalities(cameras: Sequence[str], horizon: int, *, state: bool = True) -> dict[str, Any]:
    """Return the groups of a robot with one group of states and one of actions."""
    return {
        "video": {"delta_indices": [0], "modality_keys": [*cameras]},
        "state": {"delta_indices": [0], "modality_keys": ["state"] if state else []},
        "action": {"delta_indices": [*range(horizon)], "modality_keys": ["action"], "action_configs": None},
    }


def _of_simulator(simulator: SimulatorSpec, horizon: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return numbers that map [-1, 1] to the simulator's action range and leave states unchanged, and their groups."""
    low, high, count = simulator.action_low, simulator.action_high, simulator.proprio_dim
    state = {"state": {"min": [-1.0] * count, "max": [1.0] * count}} if count else {}
    numbers = {"state": state, "action": {"action": {"min": low.tolist(), "max": high.tolist()}}}
    return numbers, _modalities(simulator.cameras, horizon, state=count > 0)


def _scratch_configs(
    model: Gr00tN17Config, version: Version, simulator: SimulatorSpec, chunk_size: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json of a model with random weights, and that of its vision-language model."""
    sizes = model.scratch
    horizon = sizes.action_horizon or chunk_size
    heads = {"num_attention_heads": sizes.heads}
    own = {
        "positional_embeddings": None,
        "num_layers": sizes.self_attention_layers,
        "attention_head_dim": sizes.hidden_size // sizes.heads,
        **heads,
    }
    dit = {
        **DIT,
        "num_layers": sizes.action_layers,
        "attention_head_dim": sizes.action_size // sizes.heads,
        "output_dim": sizes.action_size,
        **heads,
    }
    content = published_config(version) | {
        "model_name": VLM,
        "backbone_embedding_dim": sizes.hidden_size,
        "select_layer": sizes.layers,
        "hidden_size": sizes.action_size,
        "input_embedding_dim": sizes.action_size,
        "max_seq_len": horizon,
        "diffusion_model_cfg": dit,
        "attend_text_every_n_blocks": sizes.text_every,
        "vl_self_attention_cfg": own if sizes.self_attention_layers else None,
        "max_num_embodiments": 1,
        "max_state_dim": max(simulator.proprio_dim, 1),
        "max_action_dim": simulator.action_dim,
        "action_horizon": horizon,
    }
    head_dim = sizes.hidden_size // sizes.heads
    text = {**version.published["text_config"]} | {
        "hidden_size": sizes.hidden_size,
        "intermediate_size": 3 * sizes.hidden_size,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.heads,
        "head_dim": head_dim,
        "initializer_range": sizes.initializer_range,
        **heads,
    }
    vision = {**version.published["vision_config"]} | {
        "hidden_size": sizes.vision_size,
        "intermediate_size": 4 * sizes.vision_size,
        "patch_size": sizes.patch_size,
    }
    side = max(2, sizes.image_size // sizes.patch_size)
    if version is N16:
        vision |= {"num_hidden_layers": sizes.vision_layers, "num_patches": side**2, **heads}
    else:
        rest = head_dim // 2 // 3
        text["rope_scaling"] = {
            "mrope_interleaved": True,
            "mrope_section": [head_dim // 2 - 2 * rest, rest, rest],
            "rope_type": "default",
        }
        marks = sorted({(sizes.vision_layers - 1) * part // 3 for part in range(min(3, sizes.layers))})
        vision |= {
            "depth": sizes.vision_layers,
            "num_heads": sizes.heads,
            "num_position_embeddings": side**2,
            "out_hidden_size": sizes.hidden_size,
            "deepstack_visual_indexes": marks,
        }
    return content, {**version.published, "vision_config": vision, "text_config": text}
