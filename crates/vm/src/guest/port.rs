//! The serial port to the host. It is not the kernel's console, so no kernel output is mixed into
//! its lines.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::OFlags;
use rustix::termios::{OptionalActions, tcdrain, tcgetattr, tcsetattr};

use crate::wire::GuestMessage;

const PORT: &str = "/dev/ttyS1";

/// The open serial port.
pub(super) struct Port(File);

impl Port {
    pub(super) fn open() -> Result<Self, String> {
        let open = || {
            let flags = OFlags::NOCTTY.bits() as i32;
            let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(PORT)?;
            let mut settings = tcgetattr(&file)?;
            // Raw mode transmits all bytes unchanged.
            settings.make_raw();
            tcsetattr(&file, OptionalActions::Now, &settings)?;
            io::Result::Ok(file)
        };
        open().map(Self).map_err(|error| format!("{PORT}: {error}"))
    }

    pub(super) fn send(&mut self, note: &GuestMessage) -> Result<(), String> {
        self.0.write_all(&note.encode()).map_err(|error| format!("{PORT}: {error}"))
    }

    /// Waits until all data is transmitted.
    pub(super) fn drain(&self) {
        // If this fails, at most the last lines are lost, and the host reports that they are
        // missing.
        let _ = tcdrain(&self.0);
    }
}
