"""Outputs that cannot be malformed: JSON of a pydantic model, a date, one of several texts, a sum."""

from pydantic import BaseModel, Field

from paged_backend import LLM, SamplingParams, StructuredOutputsParams


class Person(BaseModel):
    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=120)
    hobbies: list[str] = Field(max_length=3)


def main() -> None:
    llm = LLM("demo")
    kinds = {
        "Describe a person called Ada.": StructuredOutputsParams(json=Person),
        "When did people first walk on the moon?": StructuredOutputsParams(regex=r"\d{4}-\d{2}-\d{2}"),
        "Is water wet?": StructuredOutputsParams(choice=["yes", "no", "it depends"]),
        "Add one and two.": StructuredOutputsParams(
            grammar='start: NUMBER (" + " NUMBER)* " = " NUMBER\nNUMBER: /[0-9]/'
        ),
    }
    chats = [[{"role": "user", "content": question}] for question in kinds]
    params = [SamplingParams(temperature=0, max_tokens=100, structured_outputs=kind) for kind in kinds.values()]
    for question, answer in zip(kinds, llm.chat(chats, params), strict=True):
        print(f"{question}\n    {answer.outputs[0].text}")
    llm.close()


if __name__ == "__main__":
    main()
