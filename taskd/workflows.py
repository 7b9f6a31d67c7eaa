"""Workflows, in which jobs wait for other jobs, and pipelines, whose stages pass results on."""

from taskd.client.workflow_tasks import workflow
from taskd.client.workflows import Pipeline, Started, Workflow, chain, group, pipeline, stage
from taskd.core.jobs.pipeline_steps import Next, Stop
from taskd.core.workflows.workflow import OnFailed

__all__ = [
    "Next",
    "OnFailed",
    "Pipeline",
    "Started",
    "Stop",
    "Workflow",
    "chain",
    "group",
    "pipeline",
    "stage",
    "workflow",
]
