//! ipc-channel as a peer: its byte channels, one for each direction. The comparison is from memory
//! to memory, so the received vector is copied into the receiver's buffer.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use ipc_channel::ipc::{
    IpcBytesReceiver, IpcBytesSender, IpcOneShotServer, IpcSender, bytes_channel,
};

use crate::group::command::{GroupTask, WorkerCommand};
use crate::group::plain::TouchedPages;
use crate::group::worker::{Member, WorkerArgs};
use crate::harness::Sample;
use crate::message::messages::{Link, MessageBuffers, pingpong};

/// File in which the first member publishes the name of its server.
const SERVER_NAME_FILE: &str = "meeting-point";
/// Timeout of the wait for the file.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

type Ends = (IpcBytesSender, IpcBytesReceiver);

struct Channels {
    to: IpcBytesSender,
    from: IpcBytesReceiver,
}

struct IpcChannel {
    channels: Channels,
    is_first: bool,
    buffers: Option<MessageBuffers<TouchedPages<u8>>>,
}

/// Connects to the other member.
pub(crate) fn join(args: &WorkerArgs) -> anyhow::Result<impl Member + use<>> {
    ensure!(args.size == 2, "two members play pingpong");
    let is_first = args.rank == 0;
    let (to, from) = if is_first { accept_peer()? } else { connect_to_first()? };
    Ok(IpcChannel { channels: Channels { to, from }, is_first, buffers: None })
}

fn accept_peer() -> anyhow::Result<Ends> {
    let (server, name) = IpcOneShotServer::<Ends>::new()?;
    let (draft, point) =
        (std::env::temp_dir().join("draft"), std::env::temp_dir().join(SERVER_NAME_FILE));
    // The rename makes the file appear with its complete contents.
    fs::write(&draft, name)?;
    fs::rename(draft, point)?;
    Ok(server.accept()?.1)
}

fn connect_to_first() -> anyhow::Result<Ends> {
    let point = std::env::temp_dir().join(SERVER_NAME_FILE);
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    let name = loop {
        if let Ok(name) = fs::read_to_string(&point) {
            break name;
        }
        ensure!(Instant::now() < deadline, "the first member did not come");
        std::thread::sleep(Duration::from_millis(1));
    };
    let ((to_second, from_first), (to_first, from_second)) = (bytes_channel()?, bytes_channel()?);
    IpcSender::<Ends>::connect(name)?.send((to_second, from_second))?;
    Ok((to_first, from_first))
}

impl Link for Channels {
    fn send(&mut self, message: &[u8]) -> anyhow::Result<()> {
        Ok(self.to.send(message)?)
    }

    fn receive(&mut self, message: &mut [u8]) -> anyhow::Result<()> {
        let arrived = self.from.recv()?;
        ensure!(arrived.len() == message.len(), "a message of {} bytes arrived", arrived.len());
        message.copy_from_slice(&arrived);
        Ok(())
    }
}

impl Member for IpcChannel {
    fn run(&mut self, order: WorkerCommand) -> anyhow::Result<Sample> {
        let GroupTask::Pingpong { bytes } = order.task else { bail!("can only play pingpong") };
        let (bytes, times) = (usize::try_from(bytes)?, order.iterations);
        pingpong(&mut self.channels, self.is_first, &mut self.buffers, bytes, times)
    }
}
