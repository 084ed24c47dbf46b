//! The flows that the two processes run.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memferry_copy::OwnedTarget;
use memferry_message::{Error, Link, Listener, Rights, ShareableBuffer, WindowHandle};

use memferry_testing::message::memory::GuardedBuffer;
use memferry_testing::message::talk::{KINDS, Kind};
use memferry_testing::pattern::{fill, first_wrong, pattern};

/// Any error, as text.
pub(crate) type Outcome = Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// The steps after two processes are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Script {
    /// A message there, and one back.
    Messages,
    /// One side exposes memory, the other puts to it and gets from it.
    Window,
}

/// A flow, and the subject's part of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flow {
    script: Script,
    kind: Kind,
    /// The subject connects; otherwise it listens.
    pub(crate) subject_dials: bool,
    /// The subject sends first, or owns the window.
    pub(crate) subject_leads: bool,
}

impl Flow {
    /// All flows, by number.
    pub(crate) fn all() -> Vec<Self> {
        let scripts = KINDS.iter().map(|&kind| (Script::Messages, kind));
        // In memory of either kind, and longer than a cell.
        let is_for_windows =
            |kind: &&Kind| kind.path.is_none() && kind.cross_memory && kind.most_bytes > 48;
        let windows = KINDS.iter().filter(is_for_windows);
        let scripts = scripts.chain(windows.map(|&kind| (Script::Window, kind)));
        let parts = [(true, true), (true, false), (false, true), (false, false)];
        let flows = scripts.flat_map(|(script, kind)| {
            parts.map(|(subject_dials, subject_leads)| Self {
                script,
                kind,
                subject_dials,
                subject_leads,
            })
        });
        flows.collect()
    }

    /// The name, for display.
    pub(crate) fn name(&self) -> String {
        let part = |is: bool, one: &'static str, other: &'static str| if is { one } else { other };
        format!(
            "{:?} ({}), the subject {} and {}",
            self.script,
            self.kind.name,
            part(self.subject_dials, "dials", "listens"),
            part(self.subject_leads, "leads", "follows")
        )
    }

    /// A listener with the settings of this flow.
    pub(crate) fn listen(&self, name: &str) -> Result<Listener, Error> {
        self.kind.builder().listen(name)
    }

    /// A connection with the settings of this flow.
    pub(crate) fn connect(&self, name: &str) -> Result<Link, Error> {
        self.kind.builder().connect_timeout(Duration::from_secs(20)).connect_link(name)
    }

    /// The part of the subject. `can_accept`: it waits for the survivor without a timeout.
    pub(crate) fn run_subject(&self, name: &str, can_accept: bool) -> Outcome {
        let link = if self.subject_dials {
            self.connect(name)?
        } else if can_accept {
            self.listen(name)?.accept()?
        } else {
            self.try_to_accept(name)?
        };
        self.run(&link, self.subject_leads)
    }

    /// For a process that may never be able to accept a connection.
    fn try_to_accept(&self, name: &str) -> Result<Link, Box<dyn std::error::Error + Send + Sync>> {
        const ACCEPT_TIMEOUT: Duration = Duration::from_millis(50);
        let (listener, began) = (self.listen(name)?, Instant::now());
        loop {
            if let Some(link) = listener.poll_accept()? {
                return Ok(link);
            }
            if memferry_sys::fault::has_fired() && began.elapsed() > ACCEPT_TIMEOUT {
                return Err("no connection could be accepted".into());
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// The part of the survivor, until it is complete or the subject has given up.
    pub(crate) fn run_survivor(
        &self,
        listener: &Listener,
        subject: &str,
        is_over: &AtomicBool,
    ) -> Outcome {
        let mut last = Err(Error::Closed.into());
        loop {
            // Checked before the attempt: what existed when the subject gave up is tried.
            let was_over = is_over.load(Ordering::Acquire);
            let link = if self.subject_dials {
                listener.poll_accept()
            } else {
                Ok(self.connect(subject).ok())
            };
            // A connection that cannot be accepted is the subject's error.
            match link {
                Ok(Some(link)) => last = self.run(&link, !self.subject_leads),
                _ => std::thread::sleep(Duration::from_micros(50)),
            }
            if last.is_ok() || was_over {
                return last;
            }
        }
    }

    fn run(&self, link: &Link, leads: bool) -> Outcome {
        match (self.script, leads) {
            (Script::Messages, true) => {
                self.send(link, 1)?;
                self.receive(link, 2)
            }
            (Script::Messages, false) => {
                self.receive(link, 1)?;
                self.send(link, 2)
            }
            (Script::Window, true) if self.kind.shareable => {
                self.own(link, ShareableBuffer::new(self.kind.most_bytes)?)
            }
            (Script::Window, true) => self.own(link, vec![0; self.kind.most_bytes]),
            (Script::Window, false) => self.visit(link),
        }
    }

    fn send(&self, link: &Link, seed: u64) -> Outcome {
        let mut memory = GuardedBuffer::try_new(self.kind.most_bytes, self.kind.shareable)?;
        fill(memory.bytes_mut(), seed);
        let sent = link.write(memory.bytes());
        assert_eq!(first_wrong(memory.bytes(), seed), None, "a source is only read");
        memory.check_guards();
        Ok(sent?)
    }

    fn receive(&self, link: &Link, seed: u64) -> Outcome {
        let mut memory = GuardedBuffer::try_new(self.kind.most_bytes, self.kind.shareable)?;
        let length = link.read(memory.bytes_mut());
        memory.check_guards();
        assert_eq!(length?, self.kind.most_bytes as u64);
        assert_eq!(first_wrong(memory.bytes(), seed), None, "a wrong byte");
        Ok(())
    }

    fn own<B: OwnedTarget + std::ops::Deref<Target = [u8]>>(
        &self,
        link: &Link,
        buffer: B,
    ) -> Outcome {
        let exposed = link.expose(buffer, Rights::READ_WRITE);
        let window = exposed.map_err(|failed| failed.error)?;
        link.write(&window.handle().to_bytes())?;
        link.read(&mut [0])?;
        let buffer = window.withdraw().map_err(|_| "the window is still accessed")?;
        assert_eq!(first_wrong(&buffer, 3), None, "a wrong byte");
        Ok(link.write(&[])?)
    }

    fn visit(&self, link: &Link) -> Outcome {
        let mut handle = [0; WindowHandle::BYTES];
        link.read(&mut handle)?;
        let handle = WindowHandle::from_bytes(handle).expect("the handle of a window");
        let remote = link.attach(handle)?;
        remote.put(0, &pattern(remote.len() as usize, 3))?;
        let mut back = vec![0; remote.len() as usize];
        remote.get(0, &mut back)?;
        assert_eq!(first_wrong(&back, 3), None, "a wrong byte");
        link.write(&[1])?;
        // The owner has withdrawn the window.
        link.read(&mut [0; 1])?;
        Ok(())
    }
}
