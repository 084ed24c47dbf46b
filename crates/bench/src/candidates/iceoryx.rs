//! iceoryx2 as a peer. The comparison is from memory to memory: a message is copied from the
//! sender's buffer into a loaned sample, and from there into the receiver's buffer. Both sides
//! poll.

use std::hint::spin_loop;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, ensure};
use iceoryx2::port::publisher::Publisher;
use iceoryx2::port::subscriber::Subscriber;
use iceoryx2::prelude::*;
use iceoryx2::service::port_factory::publish_subscribe;

use crate::group::command::{GroupTask, WorkerCommand};
use crate::group::plain::TouchedPages;
use crate::group::worker::{Member, WorkerArgs};
use crate::harness::Sample;
use crate::message::messages::{Link, MessageBuffers, pingpong};

/// Names of the services, one for each direction.
const DIRECTIONS: [&str; 2] = ["forth", "back"];
/// Timeout of the connection to the other member.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

type Service = publish_subscribe::PortFactory<ipc::Service, [u8], ()>;

struct Ports {
    publisher: Publisher<ipc::Service, [u8], ()>,
    subscriber: Subscriber<ipc::Service, [u8], ()>,
}

struct Iceoryx {
    ports: Ports,
    is_first: bool,
    buffers: Option<MessageBuffers<TouchedPages<u8>>>,
    // Declared after the ports, so that it is dropped after them.
    _node: Node<ipc::Service>,
}

/// Connects to the other member.
pub(crate) fn join(args: &WorkerArgs) -> anyhow::Result<impl Member + use<>> {
    ensure!(args.size == 2, "two members play pingpong");
    set_log_level(LogLevel::Error);
    let node = NodeBuilder::new()
        .config(&config(&args.name)?)
        .signal_handling_mode(SignalHandlingMode::Disabled)
        .create::<ipc::Service>()?;
    let is_first = args.rank == 0;
    let [forth, back] = DIRECTIONS.map(|name| service(&node, name));
    let (outgoing, incoming) = if is_first { (forth?, back?) } else { (back?, forth?) };
    let ports = Ports {
        subscriber: incoming.subscriber_builder().create()?,
        publisher: outgoing
            .publisher_builder()
            .initial_max_slice_len(4096)
            .allocation_strategy(AllocationStrategy::PowerOfTwo)
            .create()?,
    };
    for service in [&outgoing, &incoming] {
        wait_for_both_ends(service)?;
    }
    Ok(Iceoryx { ports, is_first, buffers: None, _node: node })
}

/// Configuration in which all files are in the group's directory or have the group's name as
/// prefix.
fn config(name: &str) -> anyhow::Result<Config> {
    let mut config = Config::default();
    let folder = std::env::temp_dir();
    let root = Path::new(folder.as_os_str().as_encoded_bytes());
    config.global.set_root_path(&root.map_err(|error| anyhow!("{error:?}"))?);
    let prefix = FileName::new(format!("{name}_").as_bytes());
    config.global.prefix = prefix.map_err(|error| anyhow!("{error:?}"))?;
    Ok(config)
}

fn service(node: &Node<ipc::Service>, name: &str) -> anyhow::Result<Service> {
    let builder = node.service_builder(&name.try_into()?).publish_subscribe::<[u8]>();
    Ok(builder
        .max_publishers(1)
        .max_subscribers(1)
        .subscriber_max_buffer_size(1)
        .subscriber_max_borrowed_samples(1)
        .history_size(0)
        .enable_safe_overflow(false)
        .open_or_create()?)
}

fn wait_for_both_ends(service: &Service) -> anyhow::Result<()> {
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    let ends = service.dynamic_config();
    while ends.number_of_publishers() < 1 || ends.number_of_subscribers() < 1 {
        ensure!(Instant::now() < deadline, "the other member did not come");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

impl Link for Ports {
    fn send(&mut self, message: &[u8]) -> anyhow::Result<()> {
        let sample = self.publisher.loan_slice_uninit(message.len())?;
        let receivers = sample.write_from_slice(message).send()?;
        ensure!(receivers == 1, "nobody receives");
        Ok(())
    }

    fn receive(&mut self, message: &mut [u8]) -> anyhow::Result<()> {
        loop {
            if let Some(sample) = self.subscriber.receive()? {
                message.copy_from_slice(sample.payload());
                return Ok(());
            }
            spin_loop();
        }
    }
}

impl Member for Iceoryx {
    fn run(&mut self, order: WorkerCommand) -> anyhow::Result<Sample> {
        let GroupTask::Pingpong { bytes } = order.task else { bail!("can only play pingpong") };
        let (bytes, times) = (usize::try_from(bytes)?, order.iterations);
        pingpong(&mut self.ports, self.is_first, &mut self.buffers, bytes, times)
    }
}
