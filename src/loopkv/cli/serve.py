"""``loopkv serve``: start ``vllm serve`` with a plan."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(
        "serve",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        epilog="Example: loopkv serve ./Ouro-1.4B --plan plan.json --port 8000 --max-model-len 32768",
    )
    def serve(
        context: typer.Context,
        model: str = typer.Argument(..., help="Model folder, a Hugging Face name, or looped-tiny, the embedded model."),
        plan: str = typer.Option(..., "--plan", help="Plan file, or a named plan such as kivi4."),
        prefill: str = typer.Option(
            "exact", help="exact: output never depends on chunking. fast: longer chunks for plans with shared cells."
        ),
        seed_mode: str = typer.Option(
            "sink", help="Where V precision takes its first maximum from: sink, timed or none."
        ),
        accept_weights: bool = typer.Option(False, help="Accept a plan profiled on a sibling checkpoint."),
        prefill_graphs: bool = typer.Option(True, help="Replay prefill steps of few tokens as CUDA graphs (GPUs)."),
        dry_run: bool = typer.Option(
            False,
            "--dry-run",
            help="Print the vllm command and stop, once vLLM has read it: misspelt options and, for a local model on a "
            "machine with a device, settings that the start would refuse. Memory, devices and weights are not checked.",
        ),
    ) -> None:
        """Serve MODEL through the OpenAI API with vLLM; every other option is handed to `vllm serve`."""
        import os
        import shlex

        from loopkv.artifacts.hashing import handed_on
        from loopkv.vllm_plugin.command import serve_command
        from loopkv.vllm_plugin.settings import SETTINGS_KEY, read_settings

        given = {
            "plan": plan,
            "prefill": prefill,
            "seed_mode": seed_mode,
            "accept_weights": accept_weights,
            "prefill_graphs": prefill_graphs,
        }
        settings = read_settings({SETTINGS_KEY: given})
        assert settings is not None
        command = serve_command(model, settings, context.args)
        if dry_run:
            from loopkv.vllm_plugin.start_check import check_start

            checked = check_start(command[command.index("serve") + 1 :])
            typer.echo(f"checked by vLLM: {checked}", err=True)
        typer.echo(f"$ {shlex.join(command)}", err=not dry_run)
        if not dry_run:
            os.execvpe(command[0], command, {**os.environ, **handed_on()})
