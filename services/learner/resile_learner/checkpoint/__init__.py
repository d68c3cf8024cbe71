"""Checkpoints: copied to memory at a boundary, uploaded in the background, found and verified again.

manifest   what a checkpoint is: its name, parts and manifest, and which parts are still missing
snapshot   a state copied to memory, cut into parts
store      writes, finds, verifies, loads and prunes checkpoints
uploads    the background thread of one worker
model      the final model as a safetensors file
"""
