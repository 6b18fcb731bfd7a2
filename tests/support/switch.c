// A switch in user space between network namespaces, for kernels without netem: delay, loss, rate and partitions.
//
// usage: switch INTERFACE
// A port is a tap device named INTERFACE in the network namespace of a process. Orders come line by line on stdin, each
// is answered by "ok" on stdout, and the end of stdin ends the switch:
//   attach PORT PID                       make the tap in the namespace of PID, in the place of the port's last one
//   disturb PORT DELAY_MS LOSS_PCT MBIT   of what enters or leaves the port, each way; MBIT 0: as fast as it comes
//   cut PORT OTHER 0|1                    drop what goes between the two ports
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { PORTS = 8, LONGEST_FRAME = 65600, QUEUED_BYTES = 64 << 20, BURST = 64 };
static const double LONGEST_WAIT_S = 0.5;  // for a slow link: what would wait longer is dropped, as a full router does

typedef struct Frame {
  struct Frame *next;
  double due;
  int length;
  uint8_t bytes[];
} Frame;

typedef struct {
  int tap;  // -1: nothing is attached
  double delay_s, loss, bits_per_s;
  double free_to_send, free_to_get;  // times at which the link has carried all that came before
  uint8_t address[6];
  int is_known;  // a frame with this address has come
  Frame *first, *last;  // on their way to this port, by the time at which they are due
  long queued;
} Port;

static Port ports[PORTS];
static int is_cut[PORTS][PORTS];

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static void fail(const char *what) {
  fprintf(stderr, "%s: %s\n", what, strerror(errno));
  exit(1);
}

static int open_tap(int pid, const char *interface) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/ns/net", pid);
  int own = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC), other = open(path, O_RDONLY | O_CLOEXEC);
  if (own < 0 || other < 0 || setns(other, CLONE_NEWNET)) fail(path);
  struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI};
  strncpy(request.ifr_name, interface, IFNAMSIZ - 1);
  int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (tap < 0 || ioctl(tap, TUNSETIFF, &request)) fail("/dev/net/tun");
  if (setns(own, CLONE_NEWNET)) fail("own namespace");
  close(own);
  close(other);
  return tap;
}

static void deliver(Port *to, const uint8_t *bytes, int length) {
  if (to->tap >= 0 && write(to->tap, bytes, length) < 0) return;  // the interface is down, or its queue full: lost
}

// Reserve the link for so many bytes from `start` on. Returns when they have passed, or -1 if that is too late.
static double pass(double *is_free, double bits_per_s, double start, int length) {
  if (bits_per_s <= 0) return start;
  double begin = *is_free > start ? *is_free : start;
  if (begin - start > LONGEST_WAIT_S) return -1;
  return *is_free = begin + length * 8 / bits_per_s;
}

static void forward(Port *from, Port *to, const uint8_t *bytes, int length) {
  if (is_cut[from - ports][to - ports]) return;
  if (drand48() * 100 < from->loss + to->loss) return;
  double time = now(), due = pass(&from->free_to_send, from->bits_per_s, time, length);
  if (due < 0 || (due = pass(&to->free_to_get, to->bits_per_s, due, length)) < 0) return;
  due += from->delay_s + to->delay_s;
  if (due <= time && !to->first) {
    deliver(to, bytes, length);
    return;
  }
  if (to->queued + length > QUEUED_BYTES) return;
  Frame *frame = malloc(sizeof(Frame) + length);
  if (!frame) fail("memory");
  *frame = (Frame){.due = due, .length = length};
  memcpy(frame->bytes, bytes, length);
  to->queued += length;
  if (!to->first || to->last->due <= due) {  // nearly always the last
    if (to->first) to->last->next = frame;
    else to->first = frame;
    to->last = frame;
  } else {
    Frame **place = &to->first;
    while ((*place)->due <= due) place = &(*place)->next;
    frame->next = *place;
    *place = frame;
  }
}

// Deliver what is due. Returns when the next frame is.
static double deliver_due(double time) {
  double next = time + 1;
  for (Port *port = ports; port < ports + PORTS; port++) {
    while (port->first && port->first->due <= time) {
      Frame *frame = port->first;
      deliver(port, frame->bytes, frame->length);
      port->first = frame->next;
      port->queued -= frame->length;
      free(frame);
    }
    if (port->first && port->first->due < next) next = port->first->due;
  }
  return next;
}

static void take_frames(Port *from) {
  static uint8_t bytes[LONGEST_FRAME];
  for (int i = 0; i < BURST; i++) {  // the other ports have their turn, too
    int length = read(from->tap, bytes, sizeof bytes);
    if (length < 14) return;
    memcpy(from->address, bytes + 6, 6);
    from->is_known = 1;
    Port *target = NULL;
    for (Port *port = ports; port < ports + PORTS; port++)
      if (port->is_known && !memcmp(port->address, bytes, 6)) target = port;
    for (Port *port = ports; port < ports + PORTS; port++)
      if (port != from && port->tap >= 0 && (!target || target == port)) forward(from, port, bytes, length);
  }
}

static void obey(const char *line, const char *interface) {
  int port, other, on;
  double delay_ms, loss, mbit;
  if (sscanf(line, "attach %d %d", &port, &other) == 2 && port >= 0 && port < PORTS) {
    if (ports[port].tap >= 0) close(ports[port].tap);
    ports[port].tap = open_tap(other, interface);
    ports[port].is_known = 0;
  } else if (sscanf(line, "disturb %d %lf %lf %lf", &port, &delay_ms, &loss, &mbit) == 4 && port >= 0 && port < PORTS) {
    ports[port].delay_s = delay_ms / 1e3;
    ports[port].loss = loss;
    ports[port].bits_per_s = mbit * 1e6;
  } else if (sscanf(line, "cut %d %d %d", &port, &other, &on) == 3 && port >= 0 && port < PORTS && other >= 0 &&
             other < PORTS) {
    is_cut[port][other] = is_cut[other][port] = on;
  } else {
    fprintf(stderr, "no order: %s\n", line);
    exit(1);
  }
  puts("ok");
  fflush(stdout);
}

static void take_orders(const char *interface) {
  static char text[4096];
  static int length;
  int more = read(0, text + length, sizeof text - 1 - length);
  if (more <= 0) exit(0);
  text[length += more] = 0;
  for (char *end; (end = strchr(text, '\n')); length = strlen(text)) {
    *end = 0;
    obey(text, interface);
    memmove(text, end + 1, strlen(end + 1) + 1);
  }
}

int main(int count, char **words) {
  if (count != 2) return 1;
  for (int i = 0; i < PORTS; i++) ports[i].tap = -1;
  struct pollfd polled[PORTS + 1];
  for (;;) {
    double wait = deliver_due(now()) - now();
    struct timespec timeout = {0, wait > 0 ? (long)(wait * 1e9) % 1000000000 : 0};
    if (wait >= 1) timeout = (struct timespec){1, 0};
    for (int i = 0; i < PORTS; i++) polled[i] = (struct pollfd){.fd = ports[i].tap, .events = POLLIN};
    polled[PORTS] = (struct pollfd){.fd = 0, .events = POLLIN};
    if (ppoll(polled, PORTS + 1, &timeout, NULL) < 0 && errno != EINTR) fail("ppoll");
    for (int i = 0; i < PORTS; i++)
      if (polled[i].revents & POLLIN) take_frames(&ports[i]);
    if (polled[PORTS].revents) take_orders(words[1]);
  }
}
