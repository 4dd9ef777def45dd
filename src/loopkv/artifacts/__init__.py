"""The immutable files between the stages: Profile and Plan, and how they are read and written safely."""

from loopkv.artifacts.fingerprint import Fingerprint
from loopkv.artifacts.plan import Budget, Measured, Plan, Predicted
from loopkv.artifacts.profile import DocumentInfo, Profile

__all__ = ["Budget", "DocumentInfo", "Fingerprint", "Measured", "Plan", "Predicted", "Profile"]
