# What is used of googleapis-common-protos, which has no types.
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

Code: EnumTypeWrapper
