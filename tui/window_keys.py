"""What the keys of the app's own windows set going: panel, models, settings.

A base of the chat screen, on top of the keys of the chat. Screens are imported when they are first
opened: the prompt is there sooner.
"""

from __future__ import annotations

from localrt.tui.chat_keys import ChatKeys
from localrt.tui.help_screen import HelpScreen
from localrt.tui.panel import LivePanel

__all__ = ["WindowKeys"]


class WindowKeys(ChatKeys):
    """The actions behind ``KEYS`` that are not about the conversation."""

    panel: LivePanel

    def action_help(self) -> None:
        """Commands and keys, as the user chose them."""
        self.app.push_screen(HelpScreen(self.app.keys))

    def action_panel(self) -> None:
        """Show or hide the live panel; the next time it is as it was."""
        self.panel.show(not self.panel.is_open)

    def on_live_panel_shown(self, event: LivePanel.Shown) -> None:
        """Remember it."""
        self.app.remember(panel=event.open or None)

    def action_models(self) -> None:
        """Open the models screen."""
        self.list_models("")

    def list_models(self, search: str) -> None:
        """Open it with a search in it."""
        from localrt.tui.models_screen import ModelsScreen

        if not self.app.switch.possible:
            self.say("Models are chosen when the app starts: localrt chat MODEL", "error")
            return

        def chosen(name: str | None) -> None:
            if name is not None:
                self.app.switch.to(name)

        session = self.desk.session
        current = None if session is None else session.model.info.name
        self.app.push_screen(ModelsScreen(self.app.library, current, search), chosen)

    def action_settings(self) -> None:
        """Open the settings."""
        from localrt.tui.settings_screen import SettingsScreen

        self.app.push_screen(
            SettingsScreen(
                self.app.settings,
                keys={key.does: key.shown for key in self.app.keys},
                panel=self.panel.is_open,
                show_panel=self.panel.show,
            )
        )

    def action_stop(self) -> None:
        """Esc: stop loading another model; else as in the chat."""
        if not self.app.switch.cancel():
            super().action_stop()
