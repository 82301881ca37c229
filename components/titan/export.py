"""What a model's state-dict adapter may say about exports, beyond torchtitan's interface."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class ExportRules(ABC):
    """Mixed into a state-dict adapter, heeded by ``RunCheckpoints``."""

    @abstractmethod
    def stays_float32(self, name: str) -> bool:
        """Whether the tensor of this native name keeps float32 whatever the export's type is."""

    @abstractmethod
    def export_files(self, state_dict: Mapping[str, Any]) -> dict[str, str]:
        """File name -> text of what belongs beside exported weights.

        Args:
            state_dict: native name -> tensor, in the types that are exported.
        """
