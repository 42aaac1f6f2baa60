"""A DeviceEnv behind other libraries' interfaces."""
