"""``pushkv doctor``: whether a push would work on this machine, found out by making one."""
