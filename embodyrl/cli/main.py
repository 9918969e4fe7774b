"""`embodyrl`: init, run, resume, watch, eval, verify, export, collect, report, validate, check, swap, plan, graph,
doctor, migrate, list."""

from __future__ import annotations

import importlib.util
import os
import resource
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from embodyrl.cli.arguments import (
    AtOnce,
    CommandLineError,
    ConfigArguments,
    ImageFormat,
    Keep,
    SavedOrServed,
    SavedPolicy,
    SpecOnly,
    Trust,
    check_words,
    split_arguments,
)
from embodyrl.cli.completion import option_of, override_words, sections
from embodyrl.errors import DiskFull, RunError, UserError, explain, frames_of_plugin, is_debugging, without_controls
from embodyrl.runner.stopping import Interrupted, interruptible
from embodyrl.screen import announced
from embodyrl.servers import TOKEN, is_url
from embodyrl.serving.options import ServeOptions
from embodyrl.version import __version__

app = typer.Typer(
    name="embodyrl",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Post-train a policy with reinforcement learning in robot simulators, from one YAML.",
    epilog="Exit codes: 0 done, 1 the run failed, 2 the config is wrong and nothing started, "
    "129/130/138/143 stopped by a signal (run and collect: after saving).",
)


@app.command()
def run(
    words: ConfigArguments = None,
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config",
            help="Print the whole config, with comments, the common settings first, and start nothing.",
        ),
    ] = False,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="N|A,B,...",
            help="Run with N seeds, from the config's own on, or with these. Settings with several values, as in "
            "algorithm.loss.clip_high=0.2,0.3 env=gym/pendulum,gym/cartpole, are combined with them: a sweep.",
        ),
    ] = None,
    at_once: AtOnce = None,
    trust: Trust = False,
) -> None:
    """Train: simulators, rollouts, updates, evaluations, checkpoints."""
    source, overrides = split_arguments(words)
    with announced(f"embodyrl {__version__}   reading {source or 'the built-in config'} ..."):
        from embodyrl.cli import train
        from embodyrl.config import ConfigUse, load_config, to_commented_yaml
        from embodyrl.placement.ranks import is_follower
        from embodyrl.runner.start_rules import start_rules

        several = train.asks_for_sweep(overrides, seeds, at_once, print_config=print_config)
        alone = not (several or print_config)
        also = [] if is_follower() else [start_rules]  # whose run directory the first rank has made
        loaded = load_config(source, overrides, use=ConfigUse.run, also=also, trust=trust) if alone else None
    if several:
        raise typer.Exit(train.sweep(source, overrides, seeds=seeds, at_once=at_once, trust=trust))
    if loaded is None:
        from embodyrl.config.common import common_settings

        config = load_config(source, overrides, use=ConfigUse.show, trust=trust).written
        sys.stdout.write(f"{common_settings(config)}\n{to_commented_yaml(config)}")
        sys.stdout.flush()
        load_config(source, overrides, use=ConfigUse.elsewhere, trust=trust)  # reports conflicts of settings on stderr
        return
    raise typer.Exit(train.run(loaded))


@app.command(short_help="Write a config after three questions.")
def init(
    out: Annotated[Path, typer.Argument(metavar="[FILE.yaml]", help="File to write; it must not exist.")] = Path(
        "my.yaml"
    ),
    env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Tasks in a simulator, e.g. metaworld/reach.", autocompletion=option_of("env")
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Model.", autocompletion=option_of("model"))] = None,
    algorithm: Annotated[
        str | None, typer.Option(metavar="NAME", help="Algorithm.", autocompletion=option_of("algorithm"))
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Ask nothing: take what is proposed for what is not given.")
    ] = False,
) -> None:
    """Write a config after three questions: which tasks, which model, which algorithm."""
    from embodyrl.cli import init as asking

    given = {"env": env, "model": model, "algorithm": algorithm}
    raise typer.Exit(asking.run(out, given, agreed=yes))


@app.command(short_help="Continue a run, a sweep or an evaluation.")
def resume(
    run_dir: Annotated[
        Path,
        typer.Argument(
            help="A run directory, e.g. runs/reach/2026-01-31_12-00-00, that of a sweep, or the folder of `eval --out`."
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[run.KEY=VALUE]...", help="Settings of the section run to change.")
    ] = None,
    at_once: AtOnce = None,
    without_replay: Annotated[
        bool,
        typer.Option(
            "--without-replay",
            help="Continue with an empty replay, where the files of the saved one are damaged; all else is as it was.",
        ),
    ] = False,
    trust: Trust = False,
) -> None:
    """Continue a run from its last checkpoint, as if it had never stopped; or all runs of a sweep that are not done; or
    play the episodes that an interrupted evaluation lacks."""
    from embodyrl.cli import train

    words = overrides or []
    raise typer.Exit(train.resume(run_dir, words, at_once=at_once, without_replay=without_replay, trust=trust))


@app.command(short_help="Show a running or finished run.")
def watch(
    run_dir: Annotated[Path, typer.Argument(help="A run directory, or a folder with several.")],
    once: Annotated[bool, typer.Option("--once", help="Show it a single time and end.")] = False,
) -> None:
    """Show a running or finished run, from its files; Ctrl-C ends the view, not the run."""
    from embodyrl.cli import watch as watching

    raise typer.Exit(watching.watch(run_dir, once=once))


@app.command("eval", short_help="Evaluate checkpoints; published protocols, pairs.")
def evaluate(
    checkpoint: SavedOrServed,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Settings to change, e.g. eval.episodes=500 eval.first_start_state=20000.",
            autocompletion=override_words,
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help="A YAML file or a shipped experiment: the simulator and its settings for a policy that has no config "
            "of its own, that of a server or public weights.",
        ),
    ] = None,
    video: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.mp4",
            help="Record the first episodes (tracking.video.episodes of them; 4 if that is 0); with --compare those "
            "that only one policy solves, side by side.",
        ),
    ] = None,
    protocol: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Evaluate as a published evaluation does: openvla-oft, openpi, simplevla-rl, rlinf, ... "
            "(`embodyrl list protocols`), the path of a YAML file, or `own` for the checkpoint's settings. Given "
            "several times: the same policy under each, on the same initial states.",
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="OTHER",
            help="Evaluate a second policy on the same episodes, and print the difference with its interval; also that "
            "of a server, ws://host:port.",
        ),
    ] = None,
    robustness: Annotated[
        bool,
        typer.Option(
            "--robustness",
            help="Evaluate on the same episodes without and with perturbations: camera, light, texture, layout, "
            "robot, noise, words. A table of success and its drop; in the run's folder robustness/ (or --out) also a "
            "figure and a video of episodes that are lost.",
        ),
    ] = False,
    kinds: Annotated[
        str | None,
        typer.Option(
            metavar="KIND,...",
            help="With --robustness: these kinds alone. Without: all that are possible with simulator and model.",
        ),
    ] = None,
    levels: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="With --robustness: these levels, 1 to 5.", show_default="1,3,5"),
    ] = None,
    sample: Annotated[
        bool, typer.Option("--sample", help="Sample the policy's actions instead of taking the most likely ones.")
    ] = False,
    delay_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            min=0.0,
            max=60_000.0,
            help="Let chunks of actions be so late, as inference makes them on a robot, in control steps of the "
            "simulator; sets eval.delay.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write results.json with every episode there.")
    ] = None,
    trust: Trust = False,
) -> None:
    """Evaluate a checkpoint, or the policy of a server, on held-out start states, by a published protocol, against
    another one, or with perturbations."""
    from embodyrl.cli import train

    if delay_ms is not None and any(word.startswith("eval.delay=") for word in overrides or []):
        raise CommandLineError("--delay-ms and eval.delay say the same: leave out one of them")
    if delay_ms is not None:
        overrides = [*(overrides or []), train.delay(checkpoint, delay_ms, overrides or [], config, trust=trust)]
    if robustness:
        given = {"--protocol": protocol, "--compare": compare, "--video": video}
        if other := [name for name, value in given.items() if value]:
            raise CommandLineError(f"--robustness is of one policy with its own settings: leave out {other[0]}")
        options = train.RobustnessOptions(kinds, levels)
        code = train.robustness(
            checkpoint, overrides or [], options, sample=sample, config=config, out=out, trust=trust
        )
        raise typer.Exit(code)
    if kinds is not None or levels is not None:
        name = "--levels" if kinds is None else "--kinds"
        raise CommandLineError(f"{name} says what --robustness plays: add --robustness, or leave it out")
    code = train.evaluate(
        checkpoint,
        overrides or [],
        protocols=protocol or [],
        other=compare,
        sample=sample,
        config=config,
        video=video,
        out=out,
        trust=trust,
    )
    raise typer.Exit(code)


@app.command(short_help="Compare what a run recorded with this machine.")
def verify(
    path: Annotated[
        str, typer.Argument(help="A run directory (its last checkpoint), a checkpoint folder, or an exported policy.")
    ],
    episodes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Episodes of its evaluation to play again, to compare success. Without: a few if something differs.",
        ),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Play the evaluation and write what this machine gives; compare nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    trust: Trust = False,
) -> None:
    """Compare what a run recorded with what this machine gives now: which layer is the first to differ, and by how
    much. Exit code 0: nothing differs, 1: something does."""
    from embodyrl.cli import verify as comparing

    if write:
        if as_json or episodes is not None:
            raise CommandLineError("--write compares nothing: leave out --json and --episodes")
        raise typer.Exit(comparing.write(path, trust=trust))
    raise typer.Exit(comparing.show(path, episodes, as_json=as_json, trust=trust))


@app.command(short_help="Write a policy in its model's public layout.")
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder, or a run directory (its last checkpoint).")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the policy goes; it must not exist.")] = None,
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter/--merged",
            help="Of a run with engine.lora: write only the adapters, as peft reads them, or add them to the weights.",
        ),
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME",
            help="Upload it to this model on the Hugging Face hub, after a question. One that is new is private.",
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: a model that is new is public.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --push: upload without a question.")] = False,
    trust: Trust = False,
) -> None:
    """Write a policy in its model's public layout, with a model card, and load it again to check it."""
    from embodyrl.cli import train

    upload = None if push is None else train.Upload(push, public, yes)
    raise typer.Exit(train.export(checkpoint, out, adapter=adapter, upload=upload, trust=trust))


@app.command(short_help="Let a policy act for robots and benchmarks, over the network.")
def serve(
    checkpoint: SavedPolicy,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Settings to change, e.g. engine.device=cpu.",
            autocompletion=override_words,
        ),
    ] = None,
    protocol: Annotated[
        str, typer.Option(metavar="NAME", help="How clients speak: openpi, or vla-eval.")
    ] = ServeOptions.protocol,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen at; 0.0.0.0 lets other machines in.")
    ] = ServeOptions.host,
    port: Annotated[int, typer.Option(metavar="N", help="Port; 0: any that is free.")] = ServeOptions.port,
    keys: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="NAME=KEY",
            help="Where messages have what the policy sees: a camera, `state` (parts joined by +) or `prompt`, for "
            "instance agentview=observation/image. May be given several times.",
        ),
    ] = None,
    resize: Annotated[
        bool, typer.Option("--resize", help="Scale images that have another size than the policy sees.")
    ] = False,
    token: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", envvar=TOKEN, help="Clients must send it, as `Authorization: Api-Key TOKEN`."),
    ] = None,
    sample: Annotated[
        bool, typer.Option("--sample", help="Sample the policy's actions instead of taking the most likely ones.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Of what is sampled; without: the policy's own seed.")
    ] = None,
    max_batch: Annotated[
        int, typer.Option(metavar="N", help="Most clients that are answered by one forward pass.")
    ] = ServeOptions.max_batch,
    wait_ms: Annotated[
        float, typer.Option(metavar="MS", help="Milliseconds that a request waits for others.")
    ] = ServeOptions.wait_ms,
    trust: Trust = False,
) -> None:
    """Let a policy act for robots and benchmarks, over a WebSocket, as openpi's policy server or a model server
    of vla-eval does."""
    from embodyrl.cli import serve as serving

    options = ServeOptions(
        host=host,
        port=port,
        protocol=protocol,
        keys=serving.keys_of(keys or []),
        resize=resize,
        token=token,
        sample=sample,
        seed=seed,
        max_batch=max_batch,
        wait_ms=wait_ms,
    )
    raise typer.Exit(serving.serve(checkpoint, overrides or [], options, trust=trust))


@app.command(short_help="Record demonstrations as a LeRobotDataset v3.")
def collect(
    episodes: Annotated[int, typer.Option(metavar="N", min=1, help="Number of episodes to record.")],
    words: ConfigArguments = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the dataset; it must not exist. Without: the config's data.path."),
    ] = None,
    keep: Annotated[
        Keep, typer.Option(help="Episodes to keep; with `successes`, failed episodes are replaced by further ones.")
    ] = Keep.successes,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="CHECKPOINT",
            help="Record this policy (a checkpoint, a run directory, or ws://host:port of a server) instead of the "
            "simulator's scripted expert.",
        ),
    ] = None,
    sample: Annotated[
        bool, typer.Option("--sample", help="Sample the policy's actions instead of taking the most likely ones.")
    ] = False,
    pushes: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=10.0,
            help="Pushes per episode: random actions of 0 to 3 steps, so that the demonstrations show how to recover. "
            "The first is at the start, others at random moments. 1.5: a second one in half of the episodes.",
        ),
    ] = 0.0,
    after_success: Annotated[
        int, typer.Option(min=0, help="Actions to record after the first success, unless the episode ends there.")
    ] = 0,
    images: Annotated[
        ImageFormat, typer.Option(help="Store images as PNG in tables, or as videos; both are lossless.")
    ] = ImageFormat.image,
    trust: Trust = False,
) -> None:
    """Record demonstrations in training start states, as a LeRobotDataset v3."""
    from embodyrl.cli import collect as recording
    from embodyrl.config import ConfigUse, load_config
    from embodyrl.models.remote.options import model_at

    source, overrides = split_arguments(words)
    url, checkpoint = policy if is_url(policy) else None, recording.checkpoint_of(policy)
    use = ConfigUse.play if url else ConfigUse.check if checkpoint is None else ConfigUse.run
    loaded = load_config(
        source,
        overrides,
        use=use,
        not_needed=recording.not_needed(checkpoint),
        model=None if url is None else model_at(url),
        trust=trust,
    )
    options = recording.Options(
        out=recording.destination(loaded, out),
        episodes=episodes,
        keep=keep,
        policy=url or checkpoint,
        sample=sample,
        pushes=pushes,
        after_success=after_success,
        images=images,
    )
    raise typer.Exit(recording.collect(loaded, options))


@app.command(short_help="Write the report of a run, or of several.")
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Run directories, or folders with several, also of runs that have not ended."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html",
            help="The page. Default: report.html of the run; of several runs comparison.html, here or in their folder.",
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write the numbers as CSV and JSON.")] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also draw figures for papers, as PDF and PNG.")
    ] = None,
) -> None:
    """Write the report of a run (a run does so at its end), or of several side by side: seeds as mean and band."""
    from embodyrl.cli import reporting

    raise typer.Exit(reporting.report(runs, out, data, figures))


@app.command()
def validate(words: ConfigArguments = None, elsewhere: SpecOnly = False, trust: Trust = False) -> None:
    """Check a config completely and start nothing."""
    from embodyrl.config import ConfigUse, load_config
    from embodyrl.config.rules import checkpoint_notes, weights_to_name
    from embodyrl.config.schema import LEFT_OPEN
    from embodyrl.runner.start_rules import start_rules

    source, overrides = split_arguments(words)
    use, also = (ConfigUse.elsewhere, []) if elsewhere else (ConfigUse.check, [start_rules])
    loaded = load_config(source, overrides, use=use, also=also, trust=trust)
    typer.echo(without_controls(f"{loaded.source}: OK, {loaded.values} values, 0 faults"))
    for note in (*loaded.notes, *loaded.hub_notes()):
        typer.echo(without_controls(f"note: {note}"))
    if loaded.config.model.checkpoint == LEFT_OPEN:
        typer.echo(without_controls(f"note: model.checkpoint is left open; to run, {weights_to_name(loaded.config)}"))
    elif loaded.config.model.checkpoint is not None:
        from embodyrl.models.saved import other_options, unread_note

        if unread := unread_note(Path(loaded.config.model.checkpoint)):
            typer.echo(without_controls(f"note: {unread}"))
        if changed := other_options(loaded.config.model):
            typer.echo(without_controls(f"note: the checkpoint was saved with other options: {', '.join(changed)}"))
    for note in checkpoint_notes(loaded.config):
        typer.echo(without_controls(f"note: {note}"))
    function = loaded.config.pipeline.function
    code = [*loaded.config.plugins, *([function] if function else [])]
    if code:
        typer.echo(without_controls(f"note: this config runs Python code of its own: {', '.join(code)}"))


@app.command(short_help="Try what a simulator and a model promise.")
def check(
    words: ConfigArguments = None,
    timeout: Annotated[
        float, typer.Option(metavar="S", min=1.0, help="Longest time for one promise [s].", show_default="60")
    ] = 60.0,
    trust: Trust = False,
) -> None:
    """Try what the simulator and the model of a config promise, one by one: seeds, resets, states, chunks, time limits,
    decisions, an update, a checkpoint. Exit code 0: all promises are kept, 1: some are broken."""
    from embodyrl import api
    from embodyrl.checking.promises import State
    from embodyrl.screen import say, showing

    source, overrides = split_arguments(words)
    with showing():
        found = api.check(source, overrides, timeout_s=timeout, progress=True, trust=trust)
    counts = Counter(finding.state for finding in found)
    apart = f", {counts[State.does_not_apply]} not tried" if counts[State.does_not_apply] else ""
    say(f"{counts[State.kept]} promises are kept, {counts[State.broken]} broken{apart}")
    raise typer.Exit(1 if counts[State.broken] else 0)


@app.command(short_help="Choose another algorithm, model or simulator.")
def swap(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="GROUP=OPTION... CONFIG",
            help="The YAML file, and what it is to choose: env=, model=, algorithm=; see `embodyrl list configs`.",
        ),
    ],
    write: Annotated[bool, typer.Option("--write", help="Write the file without a question.")] = False,
    elsewhere: SpecOnly = False,
) -> None:
    """Choose another algorithm, model or simulator in a file, and adjust dependent settings."""
    from embodyrl.cli import swap as swapping

    raise typer.Exit(swapping.run(words, write=write, elsewhere=elsewhere))


@app.command(short_help="Show processes, placement, memory; what fits.")
def plan(
    words: ConfigArguments = None,
    machine: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Plan for another machine: a folder with a copy of its sys/devices/system/{cpu,node}, "
            "sys/bus/pci/devices and proc/driver/nvidia.",
        ),
    ] = None,
    cpus: Annotated[str | None, typer.Option(metavar="LIST", help="Plan for these CPUs, e.g. 0-7,16.")] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(metavar="GB", help="Plan for a GPU with this much memory.", min=0.1)
    ] = None,
    memory: Annotated[float | None, typer.Option(metavar="GB", help="Plan for this much main memory.", min=0.1)] = None,
    start: Annotated[
        bool, typer.Option("--start", help="Start one simulator process to measure its memory and read its spec.")
    ] = False,
    elsewhere: SpecOnly = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    trust: Trust = False,
) -> None:
    """Show what a run needs: processes and their placement, parameters, batches, memory; and whether it fits."""
    from embodyrl.cli import plan as planning
    from embodyrl.planning.processes import read_machine

    source, overrides = split_arguments(words)
    inventory = read_machine(machine, cpus)
    options = planning.Options(
        gpu_gb=gpu_memory, host_gb=memory, elsewhere=elsewhere or machine is not None, start=start, trust=trust
    )
    raise typer.Exit(planning.show(source, overrides, inventory, options, as_json=as_json))


@app.command(short_help="Report what this machine has and what is missing.")
def doctor(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help="Check the needs of this config. Without: everything."),
    ] = None,
    trust: Trust = False,
) -> None:
    """Report what this machine has for a run, what is missing, and the remedies."""
    from embodyrl.cli import doctor as examination
    from embodyrl.config import load_config

    source, overrides = split_arguments(words)
    raise typer.Exit(examination.run(load_config(source, overrides, trust=trust) if words else None))


@app.command(short_help="Print the stages of an iteration as a chart.")
def graph(words: ConfigArguments = None, trust: Trust = False) -> None:
    """Print the stages of an iteration and the columns they pass on, as a Mermaid chart."""
    from embodyrl.config import load_config
    from embodyrl.pipelines.build import build_pipeline
    from embodyrl.pipelines.chart import to_mermaid

    source, overrides = split_arguments(words)
    chart = to_mermaid(build_pipeline(load_config(source, overrides, trust=trust).config).stages)
    typer.echo(without_controls(chart), nl=False)


@app.command(short_help="Convert a config of RLinf.")
def migrate(
    config: Annotated[Path, typer.Argument(metavar="RLINF.yaml", help="A config of RLinf for robots.")],
    out: Annotated[
        Path | None, typer.Option(metavar="MY.yaml", help="Where the result goes. Without: to the screen.")
    ] = None,
) -> None:
    """Convert a config of RLinf, and list what was converted, has no effect there or no counterpart here."""
    from embodyrl.cli import migrate as migration

    raise typer.Exit(migration.migrate(config, out))


@app.command("list", short_help="List components and whether they work here.")
def list_(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[models|simulators|tasks|algorithms|stages|experts|optimizers|configs|sinks|protocols]",
            autocompletion=sections,
        ),
    ] = None,
    which: Annotated[
        str | None, typer.Argument(metavar="[SIMULATOR]", help="Whose tasks, as in `list tasks metaworld`.")
    ] = None,
) -> None:
    """List the registered components and whether they can be used here, or a simulator's tasks."""
    from embodyrl.cli import listing

    listing.show(what, which)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"embodyrl {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """Run a command; the entry point. Errors that a user can fix become one line and an exit code."""
    try:
        check_surroundings(sys.argv[1:])
        with interruptible():
            check_words(sys.argv[1:], app)
            app(prog_name="embodyrl")
    except (UserError, RunError) as error:
        if is_debugging():
            raise
        sys.exit(explain(error))
    except Exception as error:
        if DiskFull.is_why(error) and not is_debugging():
            sys.exit(explain(DiskFull(error)))
        own = frames_of_plugin(error)
        if own is None or is_debugging():
            raise
        traceback.print_exception(type(error), error, own)  # whoever wrote the plug-in need not read how it was called
        sys.exit(1)
    except Interrupted as error:
        sys.stderr.write(f"{error}\n")
        sys.stdout.flush()
        os._exit(error.exit_code)  # threads that are importing torch could keep the interpreter from ending


# --------------------------------------------------------------------------------------------------------- surroundings

COMPUTING = ("run", "resume", "eval", "verify", "export", "collect")
"""Commands that import torch, unless they have one of the options in `LIGHT`."""
LIGHT = {"-h", "--help", "--print-config"}
SPACE_OF_TORCH = 1.75
"""Address space that torch and what a run imports with it take, in sizes of its libraries; measured for torch 2.13 on
the CPU."""


def check_surroundings(arguments: Sequence[str]) -> None:
    """Check what a command needs, before it does anything.

    Raises:
        RunError: stdout or stderr is closed, so that the next file would take its place; or `ulimit -v` leaves too
            little for torch. Within an import, a lack of memory shows as any error, or as several.
    """
    for name, silence in (("stdout", ">/dev/null"), ("stderr", "2>/dev/null")):
        if getattr(sys, name) is None:
            raise RunError(f"{name} is closed, and embodyrl prints there: to see nothing of it, write {silence}")
    command = next((argument for argument in arguments if not argument.startswith("-")), "")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if command in COMPUTING and not LIGHT.intersection(arguments) and limit != resource.RLIM_INFINITY:
        needed = space_of_torch()
        if needed > limit:
            raise RunError(
                f"this shell allows a process {limit / 1e9:.1f} GB of address space (ulimit -v {limit // 1024}), and "
                f"torch alone needs about {needed / 1e9:.1f} GB: raise the limit, as with ulimit -v unlimited"
            )


def space_of_torch() -> int:
    """Return the address space of this process once it has imported torch [bytes], estimated without importing it."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    spec = importlib.util.find_spec("torch")
    if "torch" in sys.modules or spec is None or spec.origin is None:
        return taken
    libraries = (Path(spec.origin).parent / "lib").glob("*.so*")
    return taken + int(SPACE_OF_TORCH * sum(path.stat().st_size for path in libraries))
