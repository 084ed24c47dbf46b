//! How a team comes into being: rank 0 makes its memory and an invitation, a string of bytes. Whoever has the
//! invitation asks rank 0 for the memory, over a socket, and gets it if it belongs to the same user.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use memferry_sys::affinity::allowed_cores;
use memferry_sys::fault::{Call, call};
use memferry_sys::peer_process::credentials;
use memferry_sys::seqpacket::{SeqPacketListener, SeqPacketSocket, SocketName};
use memferry_sys::shared_memory::SealedMemory;

use crate::access::{PeerMemory, probe_word};
use crate::error::Error;
use crate::shared::Layout;
use crate::team::{Operation, Team, mark};
use crate::tuning::Tuning;
use crate::waiting::{Progress, Stop};

const MAGIC: u64 = u64::from_le_bytes(*b"mfteam02");
/// Interval between looks at the sockets while a team is created.
const POLL_INTERVAL: Duration = Duration::from_micros(100);
/// Magic, name (2), token (2), size, tuning.
const WORDS: usize = 6 + Tuning::WORDS;

/// Random words.
pub(crate) fn random_words() -> io::Result<[u64; 2]> {
    let mut bytes = [0u8; 16];
    let flags = rustix::rand::GetRandomFlags::empty();
    let filled = call(Call::Getrandom, || rustix::rand::getrandom(&mut bytes, flags))?;
    if filled < bytes.len() {
        return Err(io::ErrorKind::Interrupted.into());
    }
    let word = |at: usize| std::array::from_fn(|byte| bytes[at + byte]);
    Ok([u64::from_ne_bytes(word(0)), u64::from_ne_bytes(word(8))])
}

/// The contents of an invitation.
#[derive(Debug, Clone, Copy)]
struct Words {
    name: [u64; 2],
    token: [u64; 2],
    layout: Layout,
    tuning: Tuning,
}

impl Words {
    fn socket_name(&self) -> SocketName {
        SocketName::Abstract(format!("team:{:016x}{:016x}", self.name[0], self.name[1]))
    }

    fn encode(&self) -> [u8; Invitation::BYTES] {
        let mut bytes = [0; Invitation::BYTES];
        let size = self.layout.size as u64;
        let first = [MAGIC, self.name[0], self.name[1], self.token[0], self.token[1], size];
        let words = first.into_iter().chain(self.tuning.to_words());
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<Self, Error> {
        const BAD: Error = Error::Argument("this is no invitation to a team of this version");
        let bytes: &[u8; Invitation::BYTES] = bytes.try_into().map_err(|_| BAD)?;
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[8 * at + byte]));
        let tuning = Tuning::from_words(std::array::from_fn(|at| word(6 + at)));
        let size = usize::try_from(word(5)).map_err(|_| BAD)?;
        let layout = Layout::new(size, tuning.staging_bytes).filter(|_| word(0) == MAGIC);
        let layout = layout.ok_or(BAD)?;
        Ok(Self { name: [word(1), word(2)], token: [word(3), word(4)], layout, tuning })
    }
}

/// What a rank sends to rank 0: the token of the invitation, and its rank.
struct Request {
    token: [u64; 2],
    rank: usize,
}

impl Request {
    const BYTES: usize = 24;

    fn encode(&self) -> [u8; Self::BYTES] {
        let words = [self.token[0], self.token[1], self.rank as u64];
        let mut bytes = [0; Self::BYTES];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[8 * at + byte]));
        Some(Self { token: [word(0), word(1)], rank: usize::try_from(word(2)).ok()? })
    }
}

/// The invitation to a team that rank 0 creates. Its bytes must reach all other ranks, by any way.
#[derive(Debug)]
pub struct Invitation {
    words: Words,
    bytes: [u8; Self::BYTES],
    memory: SealedMemory,
    listener: SeqPacketListener,
    team: Team,
}

impl Invitation {
    /// The length of an invitation.
    pub const BYTES: usize = 8 * WORDS;

    /// Creates the memory of a team of `size` ranks. The caller becomes rank 0.
    pub fn new(size: usize) -> Result<Self, Error> {
        Self::with_tuning(size, Tuning::default())
    }

    /// As [`Invitation::new`], with other sizes.
    pub fn with_tuning(size: usize, tuning: Tuning) -> Result<Self, Error> {
        // What the other ranks make of it.
        let tuning = Tuning::from_words(tuning.to_words());
        let layout = Layout::new(size, tuning.staging_bytes);
        let layout = layout.ok_or(Error::Argument("a team cannot have this size or staging"))?;
        let words = Words { name: random_words()?, token: random_words()?, layout, tuning };
        let memory = SealedMemory::new("memferry-team", layout.bytes())?;
        let listener = SeqPacketListener::bind(&words.socket_name())?;
        let team = Team::attach(&memory, layout, 0, tuning)?;
        Ok(Self { words, bytes: words.encode(), memory, listener, team })
    }

    /// What the other ranks need to join.
    pub fn bytes(&self) -> &[u8; Self::BYTES] {
        &self.bytes
    }

    /// Waits until all ranks have joined, at most for `timeout`.
    pub fn accept(self, progress: &mut dyn Progress, timeout: Duration) -> Result<Team, Error> {
        let deadline = Instant::now().checked_add(timeout);
        self.team.shared.register(probe_word());
        let mut server = Server::new(&self);
        while let Some(awaited) = server.first_awaited() {
            match server.serve() {
                Ok(true) => continue,
                Ok(false) => {}
                Err(error) => return Err(self.team.fail(error)),
            }
            match wait_a_little(progress, deadline) {
                Ok(true) => {}
                Ok(false) => return Err(self.team.fail(Error::RankMissing(awaited))),
                Err(Stop) => return Err(self.team.fail(Error::Stopped(0))),
            }
        }
        self.team.begin(progress, deadline)
    }
}

/// Rank 0, while it hands out the memory.
struct Server<'a> {
    invitation: &'a Invitation,
    /// Connections that have not sent their request yet.
    waiting: Vec<SeqPacketSocket>,
    /// Ranks that have not asked for the memory.
    missing: Vec<usize>,
    /// Ranks that have it, and have not said yet that they can use it.
    attaching: Vec<(usize, SeqPacketSocket)>,
}

impl<'a> Server<'a> {
    /// Maximum number of connections without a request. Further ones are accepted later.
    const MAX_WAITING: usize = 256;

    fn new(invitation: &'a Invitation) -> Self {
        let missing = (1..invitation.words.layout.size).collect();
        Self { invitation, waiting: Vec::new(), missing, attaching: Vec::new() }
    }

    /// A rank that has not joined yet.
    fn first_awaited(&self) -> Option<usize> {
        let attaching = self.attaching.first().map(|(rank, _)| *rank);
        self.missing.first().copied().or(attaching)
    }

    /// Accepts a connection, answers requests, and hears whether the memory can be used. Returns whether there was
    /// anything.
    fn serve(&mut self) -> Result<bool, Error> {
        let mut is_busy = self.accept()?;
        is_busy |= self.hear()?;
        for socket in std::mem::take(&mut self.waiting) {
            let mut packet = [0; Request::BYTES];
            match socket.receive(&mut packet) {
                Ok((length, _)) => {
                    is_busy = true;
                    self.answer(socket, &packet[..length]);
                }
                Err(error) if is_transient(&error) => self.waiting.push(socket),
                Err(_) => {}
            }
        }
        Ok(is_busy)
    }

    fn accept(&mut self) -> Result<bool, Error> {
        if self.waiting.len() >= Self::MAX_WAITING {
            return Ok(false);
        }
        match self.invitation.listener.accept() {
            Ok(socket) => {
                let own = rustix::process::geteuid().as_raw();
                if credentials(socket.as_fd()).is_ok_and(|peer| peer.uid == own) {
                    self.waiting.push(socket);
                }
                Ok(true)
            }
            Err(error) if is_transient(&error) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Strikes off the ranks that can use the memory. Fails if one cannot: nobody is to wait for it.
    fn hear(&mut self) -> Result<bool, Error> {
        let before = self.attaching.len();
        for (rank, socket) in std::mem::take(&mut self.attaching) {
            match socket.receive(&mut [0; 1]) {
                Ok((1, _)) => {}
                Err(error) if is_transient(&error) => self.attaching.push((rank, socket)),
                Ok(_) | Err(_) => return Err(Error::RankMissing(rank)),
            }
        }
        Ok(self.attaching.len() < before)
    }

    fn answer(&mut self, socket: SeqPacketSocket, packet: &[u8]) {
        let Some(request) = Request::decode(packet) else { return };
        let position = self.missing.iter().position(|rank| *rank == request.rank);
        let Some(position) = position.filter(|_| request.token == self.invitation.words.token)
        else {
            return;
        };
        if socket.send(&[1], &[self.invitation.memory.as_fd()]).is_ok() {
            self.missing.swap_remove(position);
            self.attaching.push((request.rank, socket));
        }
    }
}

fn is_transient(error: &io::Error) -> bool {
    let kinds = [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted];
    kinds.contains(&error.kind()) || error.raw_os_error() == Some(libc::ECONNABORTED)
}

/// Makes progress and sleeps. Returns whether there is time left.
fn wait_a_little(progress: &mut dyn Progress, deadline: Option<Instant>) -> Result<bool, Stop> {
    let longest = progress.poll()?;
    match longest.is_zero() {
        true => std::thread::yield_now(),
        false => std::thread::sleep(POLL_INTERVAL.min(longest)),
    }
    Ok(deadline.is_none_or(|deadline| Instant::now() < deadline))
}

impl Team {
    /// Joins a team with an invitation of rank 0, at most for `timeout`. Returns when all ranks have joined.
    pub fn join(
        invitation: &[u8],
        rank: usize,
        progress: &mut dyn Progress,
        timeout: Duration,
    ) -> Result<Self, Error> {
        let deadline = Instant::now().checked_add(timeout);
        let words = Words::decode(invitation)?;
        if rank == 0 || rank >= words.layout.size {
            return Err(Error::Argument("this rank is not one of those that join the team"));
        }
        let socket = connect(&words.socket_name(), progress, deadline, rank)?;
        let own = rustix::process::geteuid().as_raw();
        if credentials(socket.as_fd())?.uid != own {
            return Err(Error::Argument("the invitation is from another user"));
        }
        let request = Request { token: words.token, rank };
        send(&socket, &request.encode())?;
        let mut packet = [0; 1];
        let descriptor = loop {
            match socket.receive_whole(&mut packet) {
                Ok((1, descriptors)) => {
                    break descriptors.into_iter().next().ok_or(Error::Corrupt)?;
                }
                Ok(_) => return Err(Error::RankDied(0)),
                Err(error) if is_transient(&error) => keep_waiting(progress, deadline, rank)?,
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Err(Error::RankDied(0));
                }
                Err(error) => return Err(error.into()),
            }
        };
        let memory = SealedMemory::from_untrusted_fd(descriptor, words.layout.bytes())?;
        let team = Self::attach(&memory, words.layout, rank, words.tuning)?;
        team.shared.register(probe_word());
        // From now on the lock tells whether this rank is alive, and until now the socket.
        send(&socket, &[1]).map_err(|gone| team.shared.check_broken().err().unwrap_or(gone))?;
        team.begin(progress, deadline)
    }

    /// Waits for all other ranks, and finds out what they can do. This one has registered.
    fn begin(
        mut self,
        progress: &mut dyn Progress,
        deadline: Option<Instant>,
    ) -> Result<Self, Error> {
        const CORE_WORDS: usize = 16;
        // A deadline that cannot be represented is far away.
        let far = || Instant::now() + Duration::from_secs(1 << 30);
        self.shared.join_deadline = Some(deadline.unwrap_or_else(far));
        let mark = mark(Operation::Join, 0, 0, 0);
        let phase = self.publish(mark, &[], progress)?;
        self.meet_all(phase, mark, progress)?;
        let peers = match self.tuning.allow_cross_memory {
            true => PeerMemory::probe(&self.shared),
            false => None,
        };
        let mut words = [0u64; 1 + CORE_WORDS];
        words[0] = u64::from(peers.is_some());
        for core in allowed_cores().into_iter().filter(|core| *core < 64 * CORE_WORDS) {
            words[1 + core / 64] |= 1 << (core % 64);
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let phase = self.publish(mark, &bytes, progress)?;
        self.meet_all(phase, mark, progress)?;
        self.shared.join_deadline = None;
        let (mut all_direct, mut cores) = (true, [0u64; CORE_WORDS]);
        for rank in 0..self.size() {
            let mut found = [0; 8 * (1 + CORE_WORDS)];
            self.slot(rank, phase).read(0, &mut found);
            let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| found[8 * at + i]));
            all_direct &= word(0) == 1;
            cores.iter_mut().enumerate().for_each(|(at, cores)| *cores |= word(1 + at));
        }
        self.peers = peers.filter(|_| all_direct);
        let cores: u32 = cores.iter().map(|word| word.count_ones()).sum();
        self.shared.is_crowded = self.size() > cores as usize;
        Ok(self)
    }
}

/// Sends a packet to rank 0.
fn send(socket: &SeqPacketSocket, packet: &[u8]) -> Result<(), Error> {
    let gone = [io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset];
    match socket.send(packet, &[]) {
        Err(error) if gone.contains(&error.kind()) => Err(Error::RankDied(0)),
        sent => Ok(sent?),
    }
}

/// Connects to rank 0, which may have many callers at a time.
fn connect(
    name: &SocketName,
    progress: &mut dyn Progress,
    deadline: Option<Instant>,
    rank: usize,
) -> Result<SeqPacketSocket, Error> {
    loop {
        match SeqPacketSocket::connect(name) {
            Ok(socket) => return Ok(socket),
            Err(error) if is_transient(&error) => keep_waiting(progress, deadline, rank)?,
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                return Err(Error::RankDied(0));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

fn keep_waiting(
    progress: &mut dyn Progress,
    deadline: Option<Instant>,
    rank: usize,
) -> Result<(), Error> {
    match wait_a_little(progress, deadline) {
        Ok(true) => Ok(()),
        Ok(false) => Err(Error::RankMissing(0)),
        Err(Stop) => Err(Error::Stopped(rank)),
    }
}

#[cfg(test)]
mod tests {
    use memferry_testing::HangGuard;

    use super::*;
    use crate::waiting::NoProgress;

    const SHORT: Duration = Duration::from_millis(100);
    const FOREVER: Duration = Duration::MAX;

    #[test]
    fn a_rank_that_cannot_use_the_memory_is_not_waited_for() {
        let invitation = Invitation::new(3).unwrap();
        let words = invitation.words;
        let _guard = HangGuard::new("a team without one of its ranks");
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let socket = connect(&words.socket_name(), &mut NoProgress, None, 2).unwrap();
                let request = Request { token: words.token, rank: 2 };
                socket.send(&request.encode(), &[]).unwrap();
                while socket.receive(&mut [0; 1]).is_err() {
                    std::thread::yield_now();
                }
            });
            let bytes = *invitation.bytes();
            scope.spawn(move || {
                let error = Team::join(&bytes, 1, &mut NoProgress, FOREVER).unwrap_err();
                assert!(!matches!(error, Error::System(_) | Error::Argument(_)), "{error}");
            });
            let error = invitation.accept(&mut NoProgress, FOREVER).unwrap_err();
            assert_eq!(error, Error::RankMissing(2));
        });
    }

    #[test]
    fn a_rank_that_stands_still_is_not_waited_for_after_the_deadline() {
        let Invitation { words, memory, team, .. } = Invitation::new(2).unwrap();
        let mut other = Team::attach(&memory, words.layout, 1, words.tuning).unwrap();
        team.shared.register(probe_word());
        other.shared.register(probe_word());
        let mark = mark(Operation::Join, 0, 0, 0);
        other.publish(mark, &[], &mut NoProgress).unwrap();
        let error = team.begin(&mut NoProgress, Instant::now().checked_add(SHORT)).unwrap_err();
        assert_eq!(error, Error::RankMissing(1));
    }
}
