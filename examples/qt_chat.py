"""A chat window with PySide6 that stays responsive: the model loads and answers in threads.

    pip install PySide6-Essentials
    python qt_chat.py [MODEL]

Threads reach the window by signals alone. Closing it stops the answer and frees the model.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtGui import QCloseEvent, QTextCursor
from PySide6.QtWidgets import (
    QApplication,
    QHBoxLayout,
    QLineEdit,
    QPlainTextEdit,
    QProgressBar,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

import localrt


class Signals(QObject):
    """What threads tell the window."""

    loading = Signal(int, str)  # per cent (-1: unknown), words
    loaded = Signal()
    failed = Signal(str)
    text = Signal(str)
    finished = Signal(str)


class ChatWindow(QWidget):
    """A conversation above, a line to write below."""

    def __init__(self, model: str = "smollm2", **options: object) -> None:
        super().__init__(windowTitle=f"localrt: {model}")
        self.signals = Signals()
        self.chat: localrt.ChatSession | None = None
        self.thread: threading.Thread | None = None

        self.log = QPlainTextEdit(readOnly=True)
        self.line = QLineEdit(placeholderText="Write something", enabled=False)
        self.button = QPushButton("Send", enabled=False)
        self.bar = QProgressBar()
        below = QHBoxLayout()
        below.addWidget(self.line)
        below.addWidget(self.button)
        layout = QVBoxLayout(self)
        layout.addWidget(self.log)
        layout.addWidget(self.bar)
        layout.addLayout(below)
        self.resize(640, 480)

        # Queued: the slots run in the window's thread, whoever emits.
        queued = Qt.ConnectionType.QueuedConnection
        self.signals.loading.connect(self.show_loading, queued)
        self.signals.loaded.connect(self.start_chat, queued)
        self.signals.failed.connect(self.show_failure, queued)
        self.signals.text.connect(self.append, queued)
        self.signals.finished.connect(self.answer_ended, queued)
        self.line.returnPressed.connect(self.send)
        self.button.clicked.connect(self.send_or_stop)

        self.cancel = threading.Event()
        self.loading = ThreadPoolExecutor(1).submit(
            localrt.load, model, progress=self._show_step, cancel=self.cancel, **options
        )
        self.loading.add_done_callback(lambda _: self.signals.loaded.emit())

    # -- in other threads: nothing here touches a widget -----------------------------------------

    def _show_step(self, step: localrt.Progress) -> None:
        percent = 100 * step.done // step.total if step.total else -1
        self.signals.loading.emit(percent, step.stage)

    def _answer(self, text: str) -> None:
        assert self.chat is not None
        reason = ""
        try:
            for chunk in self.chat.stream(text):
                if chunk.text:
                    self.signals.text.emit(chunk.text)
                reason = chunk.finish_reason or ""
        except localrt.LocalrtError as error:
            self.signals.failed.emit(str(error))
        self.signals.finished.emit(reason)

    # -- in the window's thread ------------------------------------------------------------------

    def show_loading(self, percent: int, stage: str) -> None:
        """One step of loading."""
        self.bar.setMaximum(100 if percent >= 0 else 0)
        self.bar.setValue(max(percent, 0))
        self.bar.setFormat(f"{stage} %p %")

    def start_chat(self) -> None:
        """Loading has ended."""
        self.bar.hide()
        try:
            model = self.loading.result()
        except localrt.LocalrtError as error:
            self.show_failure(str(error))
            return
        self.chat = model.chat()
        for note in model.info.notes:
            self.append(f"({note})\n")
        self.line.setEnabled(True)
        self.button.setEnabled(True)
        self.line.setFocus()

    def show_failure(self, message: str) -> None:
        """Say what went wrong, and go on."""
        self.append(f"\n[{message}]\n")

    def append(self, text: str) -> None:
        """More text at the end."""
        self.log.moveCursor(QTextCursor.MoveOperation.End)
        self.log.insertPlainText(text)
        self.log.ensureCursorVisible()

    def send_or_stop(self) -> None:
        """The button does what it says."""
        if self.thread is not None and self.chat is not None:
            self.chat.cancel()
        else:
            self.send()

    def send(self) -> None:
        """Answer what was written."""
        text = self.line.text().strip()
        if not text or self.chat is None or self.thread is not None:
            return
        self.line.clear()
        self.append(f"\n> {text}\n\n")
        self.button.setText("Stop")
        self.thread = threading.Thread(target=self._answer, args=(text,), daemon=True)
        self.thread.start()

    def answer_ended(self, reason: str) -> None:
        """The answer is whole, or was stopped."""
        self.thread = None
        self.button.setText("Send")
        self.append("\n" if reason != "cancelled" else " [stopped]\n")

    def closeEvent(self, event: QCloseEvent) -> None:  # noqa: N802  Qt's name
        """Stop what is running and free the model."""
        if self.chat is None:
            self.cancel.set()
        else:
            self.loading.result().unload()  # ends the answer first
        if self.thread is not None:
            self.thread.join(10)
        event.accept()


if __name__ == "__main__":
    app = QApplication(sys.argv)
    window = ChatWindow(*sys.argv[1:2])
    window.show()
    sys.exit(app.exec())
