"""Outputs of a run: metrics files, TensorBoard, the terminal, `report.html`.

Records (dictionaries of plain values) and images enter; files and terminal lines leave. Sinks write; `html_report`
reads a run's folder back.
"""
