//! The serial port to the host. It is not the kernel's console, so nothing gets between its lines.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::OFlags;
use rustix::termios::{OptionalActions, tcdrain, tcgetattr, tcsetattr};

use crate::wire::Note;

const PORT: &str = "/dev/ttyS1";

/// The port, for as long as it is open.
pub(super) struct Port(File);

impl Port {
    pub(super) fn open() -> Result<Self, String> {
        let open = || {
            let flags = OFlags::NOCTTY.bits() as i32;
            let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(PORT)?;
            let mut settings = tcgetattr(&file)?;
            // Bytes are to arrive as they were written.
            settings.make_raw();
            tcsetattr(&file, OptionalActions::Now, &settings)?;
            io::Result::Ok(file)
        };
        open().map(Self).map_err(|error| format!("{PORT}: {error}"))
    }

    pub(super) fn tell(&mut self, note: &Note) -> Result<(), String> {
        self.0.write_all(&note.encode()).map_err(|error| format!("{PORT}: {error}"))
    }

    /// Waits until everything has left.
    pub(super) fn drain(&self) {
        // Without it, only the last lines are in danger, and the host misses them.
        let _ = tcdrain(&self.0);
    }
}
