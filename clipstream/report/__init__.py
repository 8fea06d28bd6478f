"""Outputs of a run: metrics files, TensorBoard, the terminal, `report.html`.

Records (dictionaries of plain values) and pictures enter; files and terminal lines leave. Sinks write; `run_reader`
reads a run's folder back for reports.
"""
