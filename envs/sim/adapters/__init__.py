"""Other simulators behind DeviceEnv: Isaac Gym, Isaac Lab, tensor environments of Gymnasium."""
