"""What clients may send: OpenAI's fields, a few of other servers, and `kv_format`. No torch.

A field that is not known changes what the client gets, so it is refused by name, unless its value says "nothing special" or it is for accounting
only. A field that is null counts as not given. Everything wrong is a UsageError whose name is the field, as `messages[0].role`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, from_json

from kvarto.engine.request import MOST_LOGPROBS, Sampling
from kvarto.errors import UsageError

MOST_CHOICES = 128
_COMPLETION_TOKENS = 16  # OpenAI's, where a completion names no max_tokens
_ACCOUNTING = ("user", "metadata", "store", "service_tier", "safety_identifier", "annotations")
_HARMLESS = frozenset([*_ACCOUNTING, "prompt_cache_key", "prompt_cache_retention"])
_NEUTRAL: dict[str, Any] = {
    "best_of": 1, "echo": False, "suffix": "", "logit_bias": {}, "modalities": ["text"], "functions": [],
    "include_obfuscation": False,
}  # fmt: skip
_FIELD = re.compile(r"[a-z_][a-z_0-9]*")
_PREAMBLE = re.compile(r"Value error, |[A-Z]\w+ should (be|have) ")
_SHOWN_CHARACTERS = 100

M = TypeVar("M", bound="Model")


class Model(BaseModel):
    """Strict types, unknown fields refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_what_says_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {
            name: value
            for name, value in data.items()
            if value is not None
            and (name in known or not (name in _HARMLESS or (name in _NEUTRAL and value == _NEUTRAL[name])))
        }


def read(kind: type[M], body: bytes) -> M:
    """A request's body as `kind`. Raises UsageError that names the field."""
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise UsageError("body", "JSON", str(error)) from error
    if not isinstance(data, dict):
        raise UsageError("body", "a JSON object", type(data).__name__)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _explain(error) from error


def _explain(error: ValidationError) -> UsageError:
    """The first thing that is wrong."""
    first = error.errors(include_url=False)[0]
    return UsageError(_path(first["loc"]) or "body", *expectation(first))


def expectation(wrong: ErrorDetails) -> tuple[str, str, str]:
    """What was expected, what came, and what to do."""
    if wrong["type"] == "missing":
        return "a value", "nothing", ""
    got = repr(wrong["input"])
    got = got if len(got) <= _SHOWN_CHARACTERS else got[:_SHOWN_CHARACTERS] + "..."
    if wrong["type"] == "extra_forbidden":
        return "only fields that this server supports", got, "leave it out"
    return _PREAMBLE.sub("", wrong["msg"]), got, ""


def _path(location: tuple[int | str, ...]) -> str:
    """messages[0].role; what stands for a member of a union is left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _FIELD.fullmatch(part):
            path += f".{part}" if path else part
        else:
            break
    return path


# ---- parts of a request ------------------------------------------------------------------------------------------------


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _text(value: Any) -> Any:
    """Text of a message's content: itself, or its parts, one a line."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ValueError("text, or parts of type text; this server reads nothing else")
    return "\n".join(part["text"] for part in value)


def _prompts(value: Any) -> Any:
    """The four shapes of OpenAI's prompt as a list of prompts."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(_is_token(item) for item in value)):
        value = [value]
    prompts = value if isinstance(value, list) else []
    if not prompts or not all(isinstance(each, str) or _is_tokens(each) for each in prompts):
        raise ValueError("a text, a list of texts, a list of tokens, or a list of lists of tokens, not empty")
    return prompts


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_token(item) for item in value)


Texts = Annotated[list[str], BeforeValidator(_listed)]
# As a union pydantic would look at every token twice; _prompts has looked.
Prompts = Annotated[list[Any], BeforeValidator(_prompts)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class CalledFunction(Model):
    """A call that the model made earlier; `arguments` is JSON as text."""

    name: FunctionName
    arguments: str = "{}"

    @property
    def values(self) -> dict[str, Any]:
        """The arguments."""
        values = from_json(self.arguments or "{}")
        assert isinstance(values, dict)
        return values


def _check_arguments(function: CalledFunction) -> CalledFunction:
    try:
        is_object = isinstance(from_json(function.arguments or "{}"), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise ValueError("a function whose arguments are a JSON object as text")
    return function


class ToolCall(Model):
    """A tool call in an assistant's message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: Annotated[CalledFunction, AfterValidator(_check_arguments)]
    index: int = 0  # some clients send back what they were streamed


class Message(Model):
    """One turn. `developer` is what OpenAI calls `system` now."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_text)] = ""
    name: str = ""
    tool_calls: list[ToolCall] = []
    tool_call_id: str = ""


class Function(Model):
    """A function that the model may call; `parameters` is a JSON schema, by default of no parameters. Arguments follow it always if `strict`."""

    name: FunctionName
    description: str = ""
    parameters: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    strict: bool = False


class Tool(Model):
    """A tool; functions are the only kind."""

    type: Literal["function"] = "function"
    function: Function


class FunctionChoice(Model):
    """The name of the function that must be called."""

    name: FunctionName


class ToolChoice(Model):
    """That one function must be called."""

    type: Literal["function"] = "function"
    function: FunctionChoice


class JsonSchema(Model):
    """A schema for the answer. It is enforced, `strict` or not."""

    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = True


class ResponseFormat(Model):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema with, and only with, the type json_schema")
        return self

    @property
    def schema_to_follow(self) -> dict[str, Any] | None:
        """The schema of the answer, None for any text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class StreamOptions(Model):
    """`include_usage`: one more chunk, with the usage, before the end."""

    include_usage: bool = False


# ---- requests ----------------------------------------------------------------------------------------------------------


class Generation(Model):
    """What both kinds of requests have. Ranges of numbers are those of `Sampling`, which checks them."""

    model: str | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: Annotated[Texts, Field(max_length=4)] = []
    stop_token_ids: Annotated[list[int], Field(max_length=64)] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    kv_format: str | None = None
    cache_salt: str | None = None

    @model_validator(mode="after")
    def _options_for_a_stream(self) -> Self:
        if self.stream_options.include_usage and not self.stream:
            raise ValueError("stream_options only with stream")
        return self

    @property
    def least_tokens(self) -> int:
        """How many must be generated at least: who wants to know of the prompt may want none."""
        return 1 if self.prompt_logprobs is None else 0

    def check_stream(self) -> None:
        """Raises UsageError if something is wanted that a stream has no place for."""
        if self.stream and self.prompt_logprobs is not None:
            raise UsageError("prompt_logprobs", "no stream", self.prompt_logprobs, "leave out stream")

    def sampling(self, max_tokens: int, logprobs: int | None, scored: int | None = None) -> list[Sampling]:
        """One for each of the n choices: a seed gives each of them another one. `scored` is its prompt_logprobs. Raises UsageError."""
        return [
            Sampling(
                max_tokens=max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                seed=None if self.seed is None else _another_seed(self.seed, choice),
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                stop=tuple(self.stop),
                stop_token_ids=tuple(self.stop_token_ids),
                ignore_eos=self.ignore_eos,
                logprobs=logprobs,
                prompt_logprobs=scored,
            )
            for choice in range(self.n)
        ]


def _another_seed(seed: int, choice: int) -> int:
    """The first choice has the client's own, right or wrong; the others follow, around the end of 64 bits."""
    return seed if choice == 0 else (seed + choice + 2**63) % 2**64 - 2**63


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: Prompts
    max_tokens: int = _COMPLETION_TOKENS
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool = False

    @property
    def least_tokens(self) -> int:
        """See `Generation.least_tokens`."""
        return 0 if self.echo else super().least_tokens

    @property
    def scored(self) -> int | None:
        """How many likely tokens the answer shows of each place of the prompt, in one way or another."""
        shown = [
            number for number in (self.prompt_logprobs, self.logprobs if self.echo else None) if number is not None
        ]
        return max(shown, default=None)


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: list[Tool] = []
    tool_choice: Literal["none", "auto", "required"] | ToolChoice = "auto"
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat = ResponseFormat(type="text")

    @property
    def limit_field(self) -> str:
        """The field that says how many tokens to generate."""
        return "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"

    @property
    def limit(self) -> int | None:
        """Tokens to generate, None for as many as there is room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def most_logprobs(self) -> int | None:
        """As `Sampling.logprobs`. Raises UsageError if only `top_logprobs` is given."""
        if self.top_logprobs is not None and not self.logprobs:
            raise UsageError("top_logprobs", "logprobs to be true as well", self.top_logprobs)
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered_tools(self) -> list[Function]:
        """What the model may call."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools]

    @property
    def required_tools(self) -> list[Function]:
        """One of these must be called; empty: none need be. Raises UsageError if there is no such function."""
        if self.tool_choice in ("none", "auto"):
            return []
        if not self.tools:
            raise UsageError("tool_choice", "tools to choose from", "none")
        if isinstance(self.tool_choice, ToolChoice):
            name = self.tool_choice.function.name
            named = [function for function in self.offered_tools if function.name == name]
            if not named:
                raise UsageError("tool_choice", "the name of one of the tools", repr(name))
            return named
        return self.offered_tools


class TokenizeRequest(Model):
    """POST /tokenize: a prompt, or messages as the model's chat template puts them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] = []
    tools: list[Tool] = []
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("either prompt or messages")
        return self
