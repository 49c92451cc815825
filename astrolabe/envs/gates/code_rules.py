"""golden_argument_invalid, signature_mismatch, unsafe_code: schema, code and goldens fit each other, and the code keeps
the static rules. Nothing is run."""

from __future__ import annotations

from referencing.exceptions import Unresolvable

from astrolabe.envs.arguments import argument_faults
from astrolabe.envs.gates.report import Finding
from astrolabe.envs.static_rules import check_code, check_signature
from astrolabe.records.environment import Environment, EnvTool


def check_golden_arguments(env: Environment) -> list[Finding]:
    """golden_argument_invalid."""
    schemas = {tool.name: tool.parameters for tool in env.tools}
    findings = []
    for golden in env.goldens:
        if golden.tool not in schemas:
            continue
        try:
            faults = argument_faults(schemas[golden.tool], golden.arguments)
        except Unresolvable as error:
            faults = [f"the schema refers outside itself: {error}"]
        if faults:
            findings.append(Finding("golden_argument_invalid", "; ".join(faults)[:600], golden.node, golden.tool))
    return findings


def check_tool_code(tool: EnvTool, stateful: bool) -> list[Finding]:
    """signature_mismatch and unsafe_code of one tool or distractor."""
    findings = [
        Finding("signature_mismatch", text, tool=tool.name)
        for text in check_signature(tool.code, tool.name, tool.parameters, stateful=stateful)
    ]
    return findings + [Finding("unsafe_code", text, tool=tool.name) for text in check_code(tool.code, tool.name)]
