"""What jflash uses of transformers, for pyright, which would read 2,800 files to know as much."""

from typing import Any

class AutoModelForCausalLM:
    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str, *model_args: Any, **kwargs: Any
    ) -> Any: ...

class AutoTokenizer:
    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str, *inputs: Any, **kwargs: Any
    ) -> PreTrainedTokenizerFast: ...

class PreTrainedTokenizerFast:
    backend_tokenizer: Any
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str,
        *init_inputs: Any,
        cache_dir: str | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        revision: str = "main",
        trust_remote_code: bool = False,
        **kwargs: Any,
    ) -> PreTrainedTokenizerFast: ...
    def decode(
        self,
        token_ids: int | list[int] | list[list[int]],
        skip_special_tokens: bool = False,
        **kwargs: Any,
    ) -> str | list[str]: ...
    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **kwargs: Any,
    ) -> str: ...
