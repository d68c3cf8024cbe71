"""Checkpoints: copied to memory at a boundary, uploaded in the background, found and verified again.

checkpointer       when checkpoints are taken, how the members share the work, and how a run resumes from one
interval           how often a checkpoint is due
checkpoint_header  what members report about checkpoints in the headers of rounds
manifest           what a checkpoint is: its name, parts and manifest, and which parts are still missing
snapshot           a state copied to memory, cut into parts
store              writes, finds, verifies, loads and prunes checkpoints; how members of a cold start agree on one
lineage            which checkpoints are a job's, and why members that were cut off cannot add to them
upload_queue       what the background threads of one worker do next
uploads            those threads
final_model        the final model as files, for safetensors and for torch.load
"""
