//! The side that is connected to: takes sockets, reads hellos when they come, answers.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry_sys::EventFd;
use memferry_sys::cross_memory::Denied;
use memferry_sys::packet_socket::{PacketListener, PacketSocket, SocketName};
use memferry_sys::peer_process;
use memferry_sys::readiness::Readiness;

use super::hello::{self, BadHello, Hello, Identity, Refusal, Welcome};
use super::reach::{ProbeWords, Reach, Trial};
use super::{Acquaintance, Allowed, EndpointId, listens_on};
use crate::error::{ConnectError, SystemError};
use crate::ring::layout::{End, Memory};
use crate::window::board::BoardView;

/// Sockets whose hello has not come yet, or the access to whose process is still being tried: at most so
/// many, for at most so long.
const MOST_PENDING: usize = 64;
const PATIENCE: Duration = Duration::from_secs(5);
/// The same while others wait for the place.
const GRACE: Duration = Duration::from_millis(200);

/// A name that others connect to.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: PacketListener,
    allowed: Allowed,
    pending: Vec<(PacketSocket, Instant)>,
    /// Callers whose hello has come, and the trial of the access to their memory has not ended.
    tried: Vec<(Caller, Trial)>,
    /// Readable when a trial has ended. There is one while any is not over.
    trial_over: Option<Arc<EventFd>>,
    /// The last look failed for want of something.
    is_troubled: bool,
    /// Readable when somebody connects, and when the hello of one who has connected comes. Made
    /// when first asked for.
    readiness: Option<Arc<Readiness>>,
}

/// A hello that has come: to be answered.
#[derive(Debug)]
pub(crate) struct Caller {
    socket: PacketSocket,
    hello: Hello,
    memory: Memory,
    board: BoardView,
    credentials: peer_process::Credentials,
    /// What this side can do with its memory.
    reach: Reach,
}

impl Listener {
    /// Takes a name.
    pub(crate) fn bind(name: &SocketName, allowed: Allowed) -> Result<Self, ConnectError> {
        let socket = PacketListener::bind(name).map_err(|error| match error.kind() {
            std::io::ErrorKind::AddrInUse if name.is_other_file() => {
                ConnectError::NotASocket(name.to_string())
            }
            std::io::ErrorKind::AddrInUse => ConnectError::NameInUse(name.to_string()),
            _ => ConnectError::CannotListen {
                name: name.to_string(),
                error: SystemError(Arc::new(error)),
            },
        })?;
        let (pending, tried) = (Vec::new(), Vec::new());
        let (trial_over, readiness) = (None, None);
        Ok(Self { socket, allowed, pending, tried, trial_over, readiness, is_troubled: false })
    }

    /// What becomes readable when there may be something to do.
    pub(crate) fn watch(&mut self) -> io::Result<Arc<Readiness>> {
        if let Some(readiness) = &self.readiness {
            return Ok(readiness.clone());
        }
        let readiness = Arc::new(Readiness::new()?);
        readiness.add(self.socket.as_fd(), false)?;
        for (socket, _) in &self.pending {
            readiness.add(socket.as_fd(), false)?;
        }
        if let Some(event) = &self.trial_over {
            readiness.add(event.as_fd(), false)?;
        }
        self.readiness = Some(readiness.clone());
        Ok(readiness)
    }

    /// What [`Listener::watch`] gave is never readable again.
    pub(crate) fn unwatch(&mut self) {
        let Some(readiness) = self.readiness.take() else { return };
        readiness.remove(self.socket.as_fd());
        self.pending.iter().for_each(|(socket, _)| readiness.remove(socket.as_fd()));
        self.trial_over.iter().for_each(|event| readiness.remove(event.as_fd()));
    }

    fn add_pending(&mut self, socket: PacketSocket) {
        if let Some(readiness) = &self.readiness {
            let _ = readiness.add(socket.as_fd(), false);
        }
        self.pending.push((socket, Instant::now()));
    }

    fn take_pending(&mut self, index: usize) -> PacketSocket {
        let (socket, _) = self.pending.swap_remove(index);
        if let Some(readiness) = &self.readiness {
            readiness.remove(socket.as_fd());
        }
        socket
    }

    /// Whether sockets wait for their hello.
    pub(crate) fn has_pending(&self) -> bool {
        !self.pending.is_empty() || !self.tried.is_empty() || self.is_troubled
    }

    /// Whether one more can be pending. Whoever has said nothing for a while makes room; those who
    /// have only just come are waited for, and others wait in the queue of the socket.
    fn has_place(&mut self) -> bool {
        if self.pending.len() + self.tried.len() >= MOST_PENDING {
            let silent = self.pending.iter().position(|(_, since)| since.elapsed() > GRACE);
            let slow = self.tried.iter().position(|(_, trial)| trial.elapsed() > GRACE);
            if let Some(slow) = slow {
                drop(self.tried.swap_remove(slow));
                if self.tried.is_empty() {
                    self.close_trial_over();
                }
            } else if let Some(silent) = silent {
                drop(self.take_pending(silent));
            }
        }
        self.pending.len() + self.tried.len() < MOST_PENDING
    }

    /// Tries the access to the memory of a caller. Gives the caller back if that is over at once.
    fn try_access(&mut self, caller: Caller, own: Identity, cross_memory: bool) -> Option<Caller> {
        let Ok(trial) = Trial::start(caller.credentials, caller.hello.probe, cross_memory) else {
            caller.refuse(own, Refusal::Absent);
            return None;
        };
        if let Some(Ok(reach)) = trial.poll() {
            return Some(Caller { reach, ..caller });
        }
        if self.trial_over.is_none() {
            self.trial_over = EventFd::new().ok().map(Arc::new);
            if let (Some(event), Some(readiness)) = (&self.trial_over, &self.readiness) {
                let _ = readiness.add(event.as_fd(), false);
            }
        }
        // Without a descriptor for it, whoever waits polls now and then.
        if let Some(event) = &self.trial_over {
            trial.signal_at_end(event);
        }
        self.tried.push((caller, trial));
        None
    }

    /// A caller the access to whose memory has been tried meanwhile.
    fn take_tried(&mut self, own: Identity) -> Option<Caller> {
        if let Some(event) = &self.trial_over {
            event.drain();
        }
        let caller = self.find_tried(own);
        if self.tried.is_empty() {
            self.close_trial_over();
        } else if self.tried.iter().any(|(_, trial)| trial.poll().is_some()) {
            self.trial_over.iter().for_each(|event| event.signal());
        }
        caller
    }

    fn find_tried(&mut self, own: Identity) -> Option<Caller> {
        let mut index = 0;
        while let Some((_, trial)) = self.tried.get(index) {
            match trial.poll() {
                None => index += 1,
                Some(Ok(reach)) => {
                    let (caller, _) = self.tried.swap_remove(index);
                    return Some(Caller { reach, ..caller });
                }
                Some(Err(_)) => self.tried.swap_remove(index).0.refuse(own, Refusal::Absent),
            }
        }
        None
    }

    /// With no trial left, nobody waits for the end of one.
    fn close_trial_over(&mut self) {
        if let (Some(event), Some(readiness)) = (self.trial_over.take(), &self.readiness) {
            readiness.remove(event.as_fd());
        }
    }

    /// The next hello that has come, of a process the access to whose memory was tried, if it may be used.
    /// Waits for a few milliseconds at most.
    pub(crate) fn poll(&mut self, own: Identity, cross_memory: bool) -> Option<Caller> {
        if let Some(caller) = self.take_tried(own) {
            return Some(caller);
        }
        for _ in 0..MOST_PENDING {
            if !self.has_place() {
                break;
            }
            let socket = match self.socket.accept() {
                Ok(socket) => socket,
                Err(error) => {
                    // Out of descriptors, say: looked at again soon, but not at once.
                    let is_troubled = error.kind() != io::ErrorKind::WouldBlock;
                    if is_troubled && !self.is_troubled {
                        let name = self.socket.name();
                        tracing::warn!(%name, %error, "a caller cannot be accepted now");
                    }
                    self.is_troubled = is_troubled;
                    break;
                }
            };
            let user = peer_process::credentials(socket.as_fd()).map(|found| found.uid);
            if !user.is_ok_and(|uid| self.allowed.permits(uid)) {
                refuse(&socket, own, Some(Refusal::User));
                continue;
            }
            self.add_pending(socket);
        }
        let mut index = 0;
        while index < self.pending.len() {
            let (socket, since) = &self.pending[index];
            let mut packet = [0; hello::MOST_BYTES];
            match socket.receive_whole(&mut packet) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    if since.elapsed() < PATIENCE {
                        index += 1;
                        continue;
                    }
                    drop(self.take_pending(index));
                }
                Err(error) if error.raw_os_error() == Some(libc::EMFILE) => {
                    refuse(&self.take_pending(index), own, Some(Refusal::Descriptors));
                }
                Ok((length, descriptors)) if length > 0 => {
                    let socket = self.take_pending(index);
                    match read_hello(&packet[..length], descriptors, &socket, &self.allowed) {
                        Ok((hello, memory, board, credentials)) => {
                            let reach = Reach::none(Denied::Unknown);
                            let caller =
                                Caller { socket, hello, memory, board, credentials, reach };
                            let caller = self.try_access(caller, own, cross_memory);
                            if caller.is_some() {
                                return caller;
                            }
                        }
                        Err(refusal) => refuse(&socket, own, refusal),
                    }
                }
                _ => drop(self.take_pending(index)),
            }
        }
        None
    }
}

fn read_hello(
    packet: &[u8],
    mut descriptors: Vec<std::os::fd::OwnedFd>,
    socket: &PacketSocket,
    allowed: &Allowed,
) -> Result<(Hello, Memory, BoardView, peer_process::Credentials), Option<Refusal>> {
    let credentials = peer_process::credentials(socket.as_fd()).map_err(|_| None)?;
    if !allowed.permits(credentials.uid) {
        return Err(Some(Refusal::User));
    }
    let hello = Hello::decode(packet).map_err(|bad| match bad {
        BadHello::Foreign => None,
        BadHello::Version(_) => Some(Refusal::Version(hello::VERSION)),
    })?;
    let refused = |error| Some(Refusal::for_memory(&error));
    let boards = descriptors.split_off(descriptors.len().min(1));
    let descriptor = descriptors.pop().ok_or(Some(Refusal::Memory))?;
    let memory = Memory::from_foreign(descriptor, End::Accepting).map_err(refused)?;
    let board = BoardView::from_descriptors(boards).map_err(refused)?;
    Ok((hello, memory, board, credentials))
}

fn refuse(socket: &PacketSocket, identity: Identity, refusal: Option<Refusal>) {
    if let Some(want) = refusal.filter(|refusal| refusal.is_want()) {
        // The other side is told too, but cannot mend it.
        tracing::warn!("a caller was refused for want of something here: {}", want.text());
    }
    if refusal.is_some() {
        let _ = socket.send(&Welcome { refusal, identity, probe: (0, 0) }.encode(), &[]);
    }
}

impl Caller {
    /// Which endpoint calls.
    pub(crate) fn id(&self) -> EndpointId {
        EndpointId { identity: self.hello.identity, credentials: self.credentials }
    }

    /// Where it can be reached, as it says. That is believed of this user's processes: they could
    /// take the name for themselves. Others must be the process that listens there, or have none.
    pub(crate) fn check_name(&mut self) -> &str {
        let name = &mut self.hello.name;
        let is_own = self.credentials.uid == rustix::process::geteuid().as_raw();
        if !name.is_empty() && !is_own && !listens_on(name, self.credentials) {
            let (uid, pid) = (self.credentials.uid, self.credentials.pid);
            tracing::warn!(uid, pid, name, "a caller claims a name that it does not listen on");
            name.clear();
        }
        name
    }

    /// Its process number, as the kernel knows it.
    pub(crate) fn pid(&self) -> u32 {
        self.credentials.pid
    }

    /// Says no.
    pub(crate) fn refuse(self, own: Identity, refusal: Refusal) {
        refuse(&self.socket, own, Some(refusal));
    }

    /// Says yes. `None` if the caller has gone meanwhile.
    pub(crate) fn welcome(self, own: Identity, board: BorrowedFd<'_>) -> Option<Acquaintance> {
        let own_probe = ProbeWords::of_process();
        let welcome = Welcome { refusal: None, identity: own, probe: own_probe.describe() };
        self.socket.send(&welcome.encode(), &[board]).ok()?;
        Some(Acquaintance {
            process: peer_process::process_of(self.socket.as_fd()),
            memory: self.memory,
            socket: self.socket,
            credentials: self.credentials,
            identity: self.hello.identity,
            name: self.hello.name,
            listening: None,
            reach: self.reach,
            board: self.board,
        })
    }
}
