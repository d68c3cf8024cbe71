"""The modules that scripts for IBM's Elastic Distributed Training import: this folder is in their ``sys.path``."""
