"""Durable checkpoints: commits that are written to a directory or URL, from which a later job resumes.

::

    <checkpoint>/
      attempt-000002-5d0c9a1e              the claim of the present run (its second attempt)
      000002-000003-000000420/             a checkpoint: attempt, generation, index of the commit
        tree.json tensors.safetensors objects.pickle
        manifest.json                      written last: lengths and SHA-256 of the others

``naming`` decides which checkpoints count and which are removed. ``directory`` reads and writes them. ``content`` turns
snapshots into files and back, using ``tree`` and ``tensors``, and ``writer`` does so on a thread beside training. Checkpoints
of earlier releases can still be read (``first_format``), and no file names any of our modules. docs/formats.md describes the
files.
"""
