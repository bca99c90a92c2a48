"""Request bodies: OpenAI's fields and vLLM's extensions. Unknown fields are ignored, as in vLLM."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from openhands_rl_plugin.core.messages import calls_in

MAX_CHOICES = 64
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
LONGEST_STOP = 1024
MAX_STOP_IDS = 1024
MAX_PROMPTS = 1024
MAX_MESSAGES = 10_000
LARGEST = 2**31 - 1
"""Of every number without a narrower bound: what 32 bits hold fits wherever it is used."""
TokenId = Annotated[int, Field(ge=-1, le=LARGEST)]
ModelName = Annotated[str, Field(max_length=1024)]
# A list ends at its first wrong element: a million of them would be a million errors.
TokenIds = Annotated[tuple[TokenId, ...], Field(fail_fast=True)]


class OpenAIModel(BaseModel):
    """Base of all request and response bodies."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(OpenAIModel):
    """Options of a stream."""

    include_usage: bool = False


class ContentPart(OpenAIModel):
    """A part of a message: text, or reasoning, whose fields are its server's own."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "input_text", "output_text", "thinking", "redacted_thinking", "reasoning", "refusal"]


class ChatMessage(OpenAIModel):
    """One message of the conversation; its calls and its reasoning are read by ``core.messages``."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Annotated[tuple[ContentPart, ...], Field(fail_fast=True)] | None = None

    @property
    def wire(self) -> dict[str, Any]:
        """The message as it was sent."""
        return self.model_dump(exclude_unset=True)

    @model_validator(mode="after")
    def _check_calls(self) -> ChatMessage:
        try:
            calls_in(self.wire)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError("tool_calls are not those of OpenAI's messages") from error
        return self


Messages = Annotated[tuple[ChatMessage, ...], Field(fail_fast=True), Field(max_length=MAX_MESSAGES)]


class FunctionDefinition(OpenAIModel):
    """Name, description and parameters of a tool."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None


class Tool(OpenAIModel):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class SamplingFields(OpenAIModel):
    """Sampling fields that chat and text completions share."""

    model: ModelName | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=LARGEST, description="0 and -1 are off.")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1, le=LARGEST)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[tuple[str, ...], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(fail_fast=True), Field(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    logit_bias: dict[str, JsonValue] | None = None
    response_format: dict[str, JsonValue] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @model_validator(mode="after")
    def _reject_unsupported(self) -> SamplingFields:
        neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
        for name, value in neutral.items():
            if getattr(self, name) not in (None, value):
                raise ValueError(f"{name} is not supported by this server")
        if self.logit_bias:
            raise ValueError("logit_bias is not supported by this server")
        if self.response_format and self.response_format.get("type") != "text":
            raise ValueError("response_format other than text is not supported by this server")
        if len(self.stops) > MAX_STOPS or not all(self.stops):
            raise ValueError(f"stop must be at most {MAX_STOPS} strings, none of them empty")
        if max(map(len, self.stops), default=0) > LONGEST_STOP:
            raise ValueError(f"a stop string must have at most {LONGEST_STOP} characters")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("`prompt_logprobs` are not available when `stream=True`.")
        if self.stream_options is not None and not self.stream:
            raise ValueError("Stream options can only be defined when `stream=True`.")
        return self


class ChatCompletionRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[Messages, Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, le=LARGEST)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Annotated[tuple[Tool, ...], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, JsonValue] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, JsonValue] | None = None

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The tools that an answer may call."""
        return [tool.model_dump() for tool in self.tools or () if self.tool_choice != "none"]

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("when using `top_logprobs`, `logprobs` must be set to true.")
        if self.tool_choice not in (None, "none", "auto"):
            raise ValueError("only tool_choice 'none' and 'auto' are supported by this server")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        return self


class CompletionRequest(SamplingFields):
    """POST /v1/completions. ``prompt``: one text, several texts, one list of token ids or several."""

    prompt: (
        str
        | TokenIds
        | Annotated[tuple[str, ...], Field(fail_fast=True), Field(max_length=MAX_PROMPTS)]
        | Annotated[tuple[TokenIds, ...], Field(fail_fast=True), Field(max_length=MAX_PROMPTS)]
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.echo:
            raise ValueError("echo is not supported by this server; use prompt_logprobs")
        return self

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """The prompts, one element each."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return (self.prompt,)  # type: ignore[return-value]
        return self.prompt  # type: ignore[return-value]


class TokenizeRequest(OpenAIModel):
    """POST /tokenize, with a text or a conversation."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[tuple[Tool, ...], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, JsonValue] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give either prompt or messages")
        return self


class LoadLoRAAdapterRequest(OpenAIModel):
    """POST /v1/load_lora_adapter."""

    lora_name: ModelName = ""
    lora_path: Annotated[str, Field(max_length=4096)] = ""


class UnloadLoRAAdapterRequest(OpenAIModel):
    """POST /v1/unload_lora_adapter."""

    lora_name: ModelName = ""


class UpdateWeightsRequest(OpenAIModel):
    """POST /update_weights_from_disk. ``weight_version``: the name of the weights in ``model_path``."""

    model_path: Annotated[str, Field(max_length=4096)]
    weight_version: ModelName
